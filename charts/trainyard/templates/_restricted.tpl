{{/*
Where values of `pod`, `head.pod` or `pools.NAME.pod` make Ray pods leave Pod Security "restricted", or give them the token of
the service account: a YAML list of `PODS: FIELD`. The argument is the chart.
*/}}
{{- define "trainyard.unrestricted" -}}
{{- $found := list -}}
{{- $shape := include "trainyard.shape" (dict "chart" . "pools" (keys .Values.pools | sortAlpha) "isRun" true) | fromYaml -}}
{{- range $field := include "trainyard.unrestricted.pod" $shape.headGroupSpec.template | fromYamlArray -}}
  {{- $found = append $found (printf "heads: %s" $field) -}}
{{- end -}}
{{- range $group := $shape.workerGroupSpecs -}}
  {{- range $field := include "trainyard.unrestricted.pod" $group.template | fromYamlArray -}}
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

{{/* The same of one pod, without its name. The argument is the template of a pod. The launcher's rules for manifests are the
same: launcher/trainyard/rules/pods/pod_security.py. */}}
{{- define "trainyard.unrestricted.pod" -}}
{{- $found := list -}}
{{- $spec := .spec -}}
{{- $security := $spec.securityContext | default dict -}}
{{- range $key := list "hostNetwork" "hostPID" "hostIPC" "automountServiceAccountToken" -}}
  {{- if get $spec $key -}}
    {{- $found = append $found $key -}}
  {{- end -}}
{{- end -}}
{{- range $name, $profile := (.metadata | default dict).annotations -}}
  {{- if and (hasPrefix "container.apparmor.security.beta.kubernetes.io/" $name) (not (regexMatch "^(|runtime/default|localhost/.*)$" $profile)) -}}
    {{- $found = append $found (printf "annotations.%s" $name) -}}
  {{- end -}}
{{- end -}}
{{- $found = concat $found (include "trainyard.unrestricted.volumes" ($spec.volumes | default list) | fromYamlArray) -}}
{{- $sysctls := list "kernel.shm_rmid_forced" "net.ipv4.ip_local_port_range" "net.ipv4.ip_local_reserved_ports" "net.ipv4.ip_unprivileged_port_start" "net.ipv4.ping_group_range" "net.ipv4.tcp_fin_timeout" "net.ipv4.tcp_keepalive_intvl" "net.ipv4.tcp_keepalive_probes" "net.ipv4.tcp_keepalive_time" "net.ipv4.tcp_rmem" "net.ipv4.tcp_syncookies" "net.ipv4.tcp_wmem" -}}
{{- range $security.sysctls -}}
  {{- if not (has .name $sysctls) -}}
    {{- $found = append $found (printf "securityContext.sysctls.%s" .name) -}}
  {{- end -}}
{{- end -}}
{{- range $field := include "trainyard.unrestricted.context" $security | fromYamlArray -}}
  {{- $found = append $found (printf "securityContext.%s" $field) -}}
{{- end -}}
{{- range concat ($spec.initContainers | default list) $spec.containers -}}
  {{- range $field := include "trainyard.unrestricted.container" (dict "pod" $security "container" .) | fromYamlArray -}}
    {{- $found = append $found $field -}}
  {{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end }}

{{/* Fields of the securityContext of a pod or a container that are set to what the profile forbids. */}}
{{- define "trainyard.unrestricted.context" -}}
{{- $found := list -}}
{{- if eq (toString .runAsUser) "0" -}}
  {{- $found = append $found "runAsUser" -}}
{{- end -}}
{{- if eq (toString .runAsNonRoot) "false" -}}
  {{- $found = append $found "runAsNonRoot" -}}
{{- end -}}
{{- if (.windowsOptions | default dict).hostProcess -}}
  {{- $found = append $found "windowsOptions.hostProcess" -}}
{{- end -}}
{{- with .seLinuxOptions -}}
  {{- if or .user .role (not (has (.type | default "") (list "" "container_t" "container_init_t" "container_kvm_t" "container_engine_t"))) -}}
    {{- $found = append $found "seLinuxOptions" -}}
  {{- end -}}
{{- end -}}
{{- range $key := list "seccompProfile" "appArmorProfile" -}}
  {{- with get $ $key -}}
    {{- if not (has .type (list "RuntimeDefault" "Localhost")) -}}
      {{- $found = append $found $key -}}
    {{- end -}}
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

{{/* The same of one container. Arguments: pod, the securityContext of its pod; container. */}}
{{- define "trainyard.unrestricted.container" -}}
{{- $name := .container.name -}}
{{- $own := .container.securityContext | default dict -}}
{{- $capabilities := $own.capabilities | default dict -}}
{{- $wrong := dict "privileged" $own.privileged -}}
{{- range $field := include "trainyard.unrestricted.context" $own | fromYamlArray -}}
  {{- $_ := set $wrong $field true -}}
{{- end -}}
{{- range $key := list "runAsNonRoot" "seccompProfile" -}}
  {{- if not (or (hasKey $own $key) (hasKey $.pod $key)) -}}
    {{- $_ := set $wrong $key true -}}
  {{- end -}}
{{- end -}}
{{- $_ := set $wrong "allowPrivilegeEscalation" (ne (toString $own.allowPrivilegeEscalation) "false") -}}
{{- $_ := set $wrong "capabilities.drop" (not (has "ALL" ($capabilities.drop | default list))) -}}
{{- $_ := set $wrong "capabilities.add" (without ($capabilities.add | default list) "NET_BIND_SERVICE") -}}
{{- $_ := set $wrong "procMount" (ne ($own.procMount | default "Default") "Default") -}}
{{- range .container.ports -}}
  {{- if .hostPort -}}
    {{- $_ := set $wrong "ports.hostPort" true -}}
  {{- end -}}
{{- end -}}
{{- $lifecycle := .container.lifecycle | default dict -}}
{{- range $place, $handler := dict "livenessProbe" .container.livenessProbe "readinessProbe" .container.readinessProbe "startupProbe" .container.startupProbe "lifecycle.postStart" $lifecycle.postStart "lifecycle.preStop" $lifecycle.preStop -}}
  {{- range $way := list "httpGet" "tcpSocket" -}}
    {{- if (get ($handler | default dict) $way | default dict).host -}}
      {{- $_ := set $wrong (printf "%s.%s.host" $place $way) true -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- $found := list -}}
{{- range $field, $is := $wrong -}}
  {{- if $is -}}
    {{- $found = append $found (printf "containers.%s.%s" $name $field) -}}
  {{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end }}
