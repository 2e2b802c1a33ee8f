{{/*
Where values of `pod`, `head.pod` or `pools.NAME.pod` make Ray pods leave Pod Security "restricted", or give them the token of
the service account: a YAML list of `PODS: FIELD`. The argument is the chart.
*/}}
{{- define "trainyard.unrestricted" -}}
{{- $found := list -}}
{{- $shape := include "trainyard.shape" (dict "chart" . "pools" (keys .Values.pools | sortAlpha) "isRun" true) | fromYaml -}}
{{- range $field := include "trainyard.unrestricted.pod" $shape.headGroupSpec.template.spec | fromYamlArray -}}
  {{- $found = append $found (printf "heads: %s" $field) -}}
{{- end -}}
{{- range $group := $shape.workerGroupSpecs -}}
  {{- range $field := include "trainyard.unrestricted.pod" $group.template.spec | fromYamlArray -}}
    {{- $found = append $found (printf "pool %s: %s" $group.groupName $field) -}}
  {{- end -}}
{{- end -}}
{{- range include "trainyard.data.volumes" . | fromYamlArray -}}
  {{- $volume := . -}}
  {{- range $field := include "trainyard.unrestricted.volumes" (list .volume) | fromYamlArray -}}
    {{- $found = append $found (printf "runs with the data volume %s: %s" $volume.name $field) -}}
  {{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end }}

{{/* The same of one pod, without its name. The argument is the spec of a pod. */}}
{{- define "trainyard.unrestricted.pod" -}}
{{- $found := list -}}
{{- range $key := list "hostNetwork" "hostPID" "hostIPC" "automountServiceAccountToken" -}}
  {{- if get $ $key -}}
    {{- $found = append $found $key -}}
  {{- end -}}
{{- end -}}
{{- $found = concat $found (include "trainyard.unrestricted.volumes" (.volumes | default list) | fromYamlArray) -}}
{{- range concat (.initContainers | default list) .containers -}}
  {{- range $field := include "trainyard.unrestricted.container" (dict "pod" $ "container" .) | fromYamlArray -}}
    {{- $found = append $found $field -}}
  {{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end }}

{{/* The same of the volumes of a pod. */}}
{{- define "trainyard.unrestricted.volumes" -}}
{{- $found := list -}}
{{- $allowed := list "name" "configMap" "csi" "downwardAPI" "emptyDir" "ephemeral" "image" "persistentVolumeClaim" "projected" "secret" -}}
{{- range . -}}
  {{- $volume := .name -}}
  {{- range $source := keys . | sortAlpha -}}
    {{- if not (has $source $allowed) -}}
      {{- $found = append $found (printf "volumes.%s.%s" $volume $source) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end }}

{{/* The same of one container. Arguments: pod, container. */}}
{{- define "trainyard.unrestricted.container" -}}
{{- $found := list -}}
{{- $name := .container.name -}}
{{- $own := .container.securityContext | default dict -}}
{{- $security := dict -}}
{{- include "trainyard.pods.patch" (dict "into" $security "patch" (.pod.securityContext | default dict)) -}}
{{- include "trainyard.pods.patch" (dict "into" $security "patch" $own) -}}
{{- $capabilities := $own.capabilities | default dict -}}
{{- $wrong := dict "privileged" $own.privileged -}}
{{- $_ := set $wrong "allowPrivilegeEscalation" (ne (toString $own.allowPrivilegeEscalation) "false") -}}
{{- $_ := set $wrong "capabilities.drop" (not (has "ALL" ($capabilities.drop | default list))) -}}
{{- $_ := set $wrong "capabilities.add" (without ($capabilities.add | default list) "NET_BIND_SERVICE") -}}
{{- $_ := set $wrong "runAsNonRoot" (not $security.runAsNonRoot) -}}
{{- $_ := set $wrong "runAsUser" (eq (toString $security.runAsUser) "0") -}}
{{- $_ := set $wrong "seccompProfile" (not (has ($security.seccompProfile | default dict).type (list "RuntimeDefault" "Localhost"))) -}}
{{- $_ := set $wrong "procMount" (ne ($own.procMount | default "Default") "Default") -}}
{{- range .container.ports -}}
  {{- if .hostPort -}}
    {{- $_ := set $wrong "ports.hostPort" true -}}
  {{- end -}}
{{- end -}}
{{- range $field, $is := $wrong -}}
  {{- if $is -}}
    {{- $found = append $found (printf "containers.%s.%s" $name $field) -}}
  {{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end }}
