{{/*
What the values set for pods beside sizes and nodes: `pod` for all of them, and the more special `head.pod` and
`pools.NAME.pod`. Each pod gets what concerns it, which the table in docs/guides/variables-and-volumes.md lists.

Two templates here change a map in place and print nothing, because a template can only return text.
*/}}

{{/*
A pod, or the template of one, with what the values set for it. Arguments: chart; nodes: the head or a pool of the values;
role: `ray` for heads and workers, `storage` for other pods with the storage, `image` for pods that only pull the image;
pod: the text of the pod, whose first container is the one that the settings are for.
*/}}
{{- define "trainyard.pods.apply" -}}
{{- $pod := include "trainyard.pods.withSettings" . | fromYaml -}}
{{- range $patch := list .chart.Values.pod.patch (.nodes.pod | default dict).patch -}}
  {{- include "trainyard.pods.applyPatch" (dict "pod" $pod "role" $.role "patch" $patch) -}}
{{- end -}}
{{- toYaml $pod -}}
{{- end }}

{{/* The same without the patches. */}}
{{- define "trainyard.pods.withSettings" -}}
{{- $pod := .pod | fromYaml -}}
{{- $spec := $pod.spec -}}
{{- $container := first $spec.containers -}}
{{- $settings := include "trainyard.pods.settings" . | fromYaml -}}
{{- range $key := list "labels" "annotations" -}}
  {{- with get $settings $key -}}
    {{- $_ := set $pod.metadata $key (merge dict (get $pod.metadata $key | default dict) .) -}}
  {{- end -}}
{{- end -}}
{{- $affinity := $settings.affinity | default dict -}}
{{- if ne .role "ray" -}}
  {{- $affinity = pick $affinity "nodeAffinity" -}}
{{- end -}}
{{- $terms := include "trainyard.pods.nodeTerms" $spec.affinity | fromYamlArray -}}
{{- $moreTerms := include "trainyard.pods.nodeTerms" $affinity | fromYamlArray -}}
{{- include "trainyard.pods.add" (dict "into" $spec "from" (dict "affinity" $affinity)) -}}
{{- if and $terms $moreTerms -}}
  {{- $both := include "trainyard.placement.bothTerms" (dict "first" $terms "second" $moreTerms) | fromYamlArray -}}
  {{- $_ := set $spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution "nodeSelectorTerms" $both -}}
{{- end -}}
{{- $fields := list "schedulerName" "runtimeClassName" -}}
{{- if ne .role "image" -}}
  {{- $fields = concat $fields (list "priorityClassName" "dnsConfig" "hostAliases") -}}
  {{- include "trainyard.pods.add" (dict "into" $spec "from" (pick $settings "volumes")) -}}
  {{- include "trainyard.pods.add" (dict "into" $container "from" (pick $settings "envFrom" "volumeMounts")) -}}
  {{- range $name, $value := $settings.env -}}
    {{- $_ := set $container "env" (append $container.env (dict "name" $name "value" $value)) -}}
  {{- end -}}
{{- end -}}
{{- if eq .role "ray" -}}
  {{- $fields = append $fields "topologySpreadConstraints" -}}
  {{- with $settings.resources -}}
    {{- include "trainyard.pods.add" (dict "into" $container "from" (dict "resources" (dict "requests" . "limits" .))) -}}
  {{- end -}}
  {{- $sidecars := include "trainyard.pods.confined" $settings.sidecars | fromYamlArray -}}
  {{- $_ := set $spec "containers" (concat $spec.containers $sidecars) -}}
  {{- $_ := set $spec "initContainers" (include "trainyard.pods.confined" $settings.initContainers | fromYamlArray) -}}
{{- end -}}
{{- range $key := $fields -}}
  {{- include "trainyard.pods.add" (dict "into" $spec "from" (pick $settings $key)) -}}
{{- end -}}
{{- range $key := list "affinity" "initContainers" -}}
  {{- if not (get $spec $key) -}}
    {{- $_ := unset $spec $key -}}
  {{- end -}}
{{- end -}}
{{- toYaml $pod -}}
{{- end }}

{{/* The required nodeSelectorTerms of an affinity as a YAML list, which is empty without any. */}}
{{- define "trainyard.pods.nodeTerms" -}}
{{- $here := . -}}
{{- range $key := list "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" "nodeSelectorTerms" -}}
  {{- $here = ternary $here dict (kindIs "map" $here) -}}
  {{- $here = get $here $key -}}
{{- end -}}
{{- toYaml (ternary $here list (kindIs "slice" $here)) -}}
{{- end }}

{{/* `pod` and the special settings of a head or pool as one map, without the patches. Arguments: chart, nodes. */}}
{{- define "trainyard.pods.settings" -}}
{{- $settings := omit .chart.Values.pod "patch" | deepCopy -}}
{{- include "trainyard.pods.add" (dict "into" $settings "from" (omit (.nodes.pod | default dict) "patch")) -}}
{{- range $key, $value := $settings -}}
  {{- if not $value -}}
    {{- $_ := unset $settings $key -}}
  {{- end -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end }}

{{/* Adds one map to another in place: maps are merged, lists are added, and of other values the new one wins. Arguments:
into, from. */}}
{{- define "trainyard.pods.add" -}}
{{- range $key, $value := .from -}}
  {{- $there := get $.into $key -}}
  {{- if and (kindIs "map" $there) (kindIs "map" $value) -}}
    {{- include "trainyard.pods.add" (dict "into" $there "from" $value) -}}
  {{- else if and (kindIs "slice" $there) (kindIs "slice" $value) -}}
    {{- $_ := set $.into $key (concat $there $value) -}}
  {{- else -}}
    {{- $_ := set $.into $key (deepCopy $value) -}}
  {{- end -}}
{{- end -}}
{{- end }}

{{/* Containers as a YAML list, each with the chart's security context, of which a container may change fields. */}}
{{- define "trainyard.pods.confined" -}}
{{- $containers := list -}}
{{- range . -}}
  {{- $container := deepCopy . -}}
  {{- $security := include "trainyard.shape.containerSecurity" $ | fromYaml -}}
  {{- include "trainyard.pods.patch" (dict "into" $security "patch" .securityContext) -}}
  {{- $containers = append $containers (set $container "securityContext" $security) -}}
{{- end -}}
{{- toYaml $containers -}}
{{- end }}

{{/*
Patches a pod in place. Containers of a patch are those of Ray pods, so other pods get the rest of it, and pods that only
pull the image get nothing. Arguments: pod, role, patch.
*/}}
{{- define "trainyard.pods.applyPatch" -}}
{{- $patch := deepCopy (.patch | default dict) -}}
{{- if and (ne .role "ray") $patch.spec -}}
  {{- $_ := set $patch "spec" (omit $patch.spec "containers" "initContainers") -}}
{{- end -}}
{{- if ne .role "image" -}}
  {{- include "trainyard.pods.patch" (dict "into" .pod "patch" $patch) -}}
{{- end -}}
{{- end }}

{{/*
Patches a map in place: null deletes a key, maps are merged, lists of objects with names are merged by name (mounts by their
path), and other values replace. Arguments: into, patch.
*/}}
{{- define "trainyard.pods.patch" -}}
{{- range $key, $value := .patch -}}
  {{- $there := get $.into $key -}}
  {{- $identity := ternary "mountPath" "name" (eq $key "volumeMounts") -}}
  {{- if kindIs "invalid" $value -}}
    {{- $_ := unset $.into $key -}}
  {{- else if kindIs "map" $value -}}
    {{- if not (kindIs "map" $there) -}}
      {{- $there = dict -}}
      {{- $_ := set $.into $key $there -}}
    {{- end -}}
    {{- include "trainyard.pods.patch" (dict "into" $there "patch" $value) -}}
  {{- else if and (include "trainyard.pods.areNamed" (dict "list" $there "by" $identity)) (include "trainyard.pods.areNamed" (dict "list" $value "by" $identity)) -}}
    {{- $merged := $there -}}
    {{- range $item := $value -}}
      {{- $same := dict -}}
      {{- range $merged -}}
        {{- if eq (get . $identity) (get $item $identity) -}}
          {{- $same = . -}}
        {{- end -}}
      {{- end -}}
      {{- if not $same -}}
        {{- $merged = append $merged $same -}}
      {{- end -}}
      {{- include "trainyard.pods.patch" (dict "into" $same "patch" $item) -}}
    {{- end -}}
    {{- $_ := set $.into $key $merged -}}
  {{- else -}}
    {{- $_ := set $.into $key $value -}}
  {{- end -}}
{{- end -}}
{{- end }}

{{/* "true" if a value is a list of maps that all have a key, else an empty string. Arguments: list, by. */}}
{{- define "trainyard.pods.areNamed" -}}
{{- $by := .by -}}
{{- $are := kindIs "slice" .list -}}
{{- if $are -}}
  {{- range .list -}}
    {{- $are = and $are (kindIs "map" .) (hasKey . $by) -}}
  {{- end -}}
{{- end -}}
{{- ternary "true" "" $are -}}
{{- end }}
