{{/*
Problems of `pod`, `head.pod` and `pools.NAME.pod`, as a YAML list of sentences: names that trainyard, Ray or KubeRay use,
names that occur twice, and patches that change what trainyard sets.
*/}}
{{- define "trainyard.podRequirements" -}}
{{- $problems := list -}}
{{- $values := .Values -}}
{{- $levels := list (dict "path" "pod" "settings" $values.pod "general" dict "nodes" dict) -}}
{{- $levels = append $levels (dict "path" "head.pod" "settings" $values.head.pod "general" $values.pod "nodes" $values.head) -}}
{{- range $name, $pool := $values.pools -}}
  {{- $levels = append $levels (dict "path" (printf "pools.%s.pod" $name) "settings" ($pool.pod | default dict) "general" $values.pod "nodes" $pool) -}}
{{- end -}}
{{- range $levels -}}
  {{- $level := merge (dict "chart" $) . -}}
  {{- range $check := list "names" "volumes" "containers" "scheduling" -}}
    {{- $problems = concat $problems (include (printf "trainyard.podRequirements.%s" $check) $level | fromYamlArray) -}}
  {{- end -}}
{{- end -}}
{{- $problems = concat $problems (include "trainyard.podRequirements.patches" $ | fromYamlArray) -}}
{{- toYaml (uniq $problems) -}}
{{- end }}

{{/* Names of variables, labels and annotations. The arguments of this and of the next templates: chart; path, settings: a
level of the values; general: `pod`, or empty if it is that level itself; nodes: the head or the pool. */}}
{{- define "trainyard.podRequirements.names" -}}
{{- $problems := list -}}
{{- $path := .path -}}
{{- range $name, $_ := .settings.env -}}
  {{- if or (regexMatch "^(RAY|TRAINYARD)_" $name) (has $name (include "trainyard.podRequirements.variables" $.chart | fromYamlArray)) -}}
    {{- $problems = append $problems (printf "%s.env contains %s, a variable of trainyard or Ray. Use another name. Variables of Ray that the chart does not set can be set by %s.patch." $path $name $path) -}}
  {{- end -}}
{{- end -}}
{{- range $key := list "labels" "annotations" -}}
  {{- range $name, $_ := get $.settings $key | default dict -}}
    {{- if include "trainyard.podRequirements.isReservedKey" $name -}}
      {{- $problems = append $problems (printf "%s.%s contains %s, a key of trainyard, Ray, a queue or Helm. Use another key." $path $key $name) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- toYaml $problems -}}
{{- end }}

{{/* The names of the variables that the chart sets in all pods with the storage. The argument is the chart. */}}
{{- define "trainyard.podRequirements.variables" -}}
{{- $names := list -}}
{{- range include "trainyard.shape.env" . | fromYamlArray -}}
  {{- $names = append $names .name -}}
{{- end -}}
{{- toYaml $names -}}
{{- end }}

{{/* "true" for a key of a label or annotation that is not the platform engineer's, else an empty string. */}}
{{- define "trainyard.podRequirements.isReservedKey" -}}
{{- if regexMatch "^(([a-z0-9.-]+\\.)?(ray\\.io|trainyard\\.io|kueue\\.x-k8s\\.io|helm\\.sh)/|app\\.kubernetes\\.io/(part-of|managed-by)$)" . -}}
true
{{- end -}}
{{- end }}

{{/* Volumes and their mounts. */}}
{{- define "trainyard.podRequirements.volumes" -}}
{{- $problems := list -}}
{{- $path := .path -}}
{{- $own := list "tmp" "home" "storage" -}}
{{- $volumes := list -}}
{{- range .general.volumes -}}
  {{- $volumes = append $volumes .name -}}
{{- end -}}
{{- $data := include "trainyard.data.volumes" .chart | fromYamlArray -}}
{{- $reserved := concat $own (list "autoscaler-token" "shared-mem" "ray-logs") -}}
{{- range $data -}}
  {{- $reserved = append $reserved .volume.name -}}
{{- end -}}
{{- range .settings.volumes -}}
  {{- if has .name $reserved -}}
    {{- $problems = append $problems (printf "%s.volumes contains %s, the name of a volume of trainyard or KubeRay. Use another name." $path .name) -}}
  {{- else if has .name $volumes -}}
    {{- $problems = append $problems (printf "%s.volumes contains %s twice, together with pod.volumes. Give each volume its own name." $path .name) -}}
  {{- end -}}
  {{- $volumes = append $volumes .name -}}
{{- end -}}
{{- $mounts := list -}}
{{- range .general.volumeMounts -}}
  {{- $mounts = append $mounts (clean .mountPath) -}}
{{- end -}}
{{- $taken := list "/" "/tmp" "/dev/shm" (include "trainyard.shape.home" $) "/var/run/secrets/kubernetes.io/serviceaccount" -}}
{{- with .chart.Values.storage.claim -}}
  {{- $taken = append $taken (clean .mountPath) -}}
{{- end -}}
{{- range $data -}}
  {{- $taken = append $taken (clean .mount.mountPath) -}}
{{- end -}}
{{- range .settings.volumeMounts -}}
  {{- $mountPath := clean .mountPath -}}
  {{- if not (has .name (concat $own $volumes)) -}}
    {{- $problems = append $problems (printf "%s.volumeMounts mounts %s, which is not a volume of the pod. Add it to %s.volumes." $path .name $path) -}}
  {{- end -}}
  {{- if has $mountPath $taken -}}
    {{- $problems = append $problems (printf "%s.volumeMounts mounts %s at %s, a path that the pods use for other files. Use another path." $path .name $mountPath) -}}
  {{- else if has $mountPath $mounts -}}
    {{- $problems = append $problems (printf "%s.volumeMounts has two mounts at %s, together with pod.volumeMounts. Use another path." $path $mountPath) -}}
  {{- end -}}
  {{- $mounts = append $mounts $mountPath -}}
{{- end -}}
{{- toYaml $problems -}}
{{- end }}

{{/* Names of further containers, and further resources of the Ray container. */}}
{{- define "trainyard.podRequirements.containers" -}}
{{- $problems := list -}}
{{- $path := .path -}}
{{- $names := list -}}
{{- range concat (.general.initContainers | default list) (.general.sidecars | default list) -}}
  {{- $names = append $names .name -}}
{{- end -}}
{{- range $key := list "initContainers" "sidecars" -}}
  {{- range get $.settings $key | default list -}}
    {{- if has .name (list "ray-head" "ray-worker" "autoscaler" "wait-gcs-ready") -}}
      {{- $problems = append $problems (printf "%s.%s contains %s, the name of a container of trainyard or KubeRay. Use another name." $path $key .name) -}}
    {{- else if has .name $names -}}
      {{- $problems = append $problems (printf "%s.%s contains %s, the name of another container of the pod. Give each container its own name." $path $key .name) -}}
    {{- end -}}
    {{- $names = append $names .name -}}
  {{- end -}}
{{- end -}}
{{- $sized := list "cpu" "memory" "ephemeral-storage" "nvidia.com/gpu" -}}
{{- range .chart.Values.pools -}}
  {{- $sized = concat $sized (compact (list .gpuResource (.network | default dict).resource)) -}}
{{- end -}}
{{- range $name, $_ := .settings.resources -}}
  {{- if has $name $sized -}}
    {{- $problems = append $problems (printf "%s.resources contains %s, which follows from the keys of the head and of pools: cpus, memoryGib, ephemeralStorageGib, gpusPerNode, network. Set it there." $path $name) -}}
  {{- end -}}
{{- end -}}
{{- toYaml $problems -}}
{{- end }}

{{/* Settings of the scheduler that the queue overrides, and terms of which a node has to match only one. */}}
{{- define "trainyard.podRequirements.scheduling" -}}
{{- $problems := list -}}
{{- $queue := .chart.Values.queue.system -}}
{{- if and .settings.schedulerName (has $queue (list "volcano" "yunikorn" "kai")) -}}
  {{- $problems = append $problems (printf "%s.schedulerName is %s, but with queue.system %s the operator sets the scheduler of Ray pods. Set %s.schedulerName to \"\"." .path .settings.schedulerName $queue .path) -}}
{{- end -}}
{{- if and (include "trainyard.pods.nodeTerms" .settings.affinity | fromYamlArray) (include "trainyard.pods.nodeTerms" .general.affinity | fromYamlArray) -}}
  {{- $problems = append $problems (printf "%s.affinity and pod.affinity both contain nodeSelectorTerms. Kubernetes requires only one of all terms, so the second list would not restrict the first. Set them in one place, or use nodeSelector." .path) -}}
{{- end -}}
{{- toYaml $problems -}}
{{- end }}

{{/* Patches of Ray pods. Each is tried alone on the pod with its other settings, then both together. The argument is the
chart. */}}
{{- define "trainyard.podRequirements.patches" -}}
{{- $problems := list -}}
{{- $values := .Values -}}
{{- $targets := list (dict "path" "head.pod" "nodes" $values.head "pod" (include "trainyard.shape.head" (dict "chart" $ "isRun" true))) -}}
{{- range $name, $pool := $values.pools -}}
  {{- $targets = append $targets (dict "path" (printf "pools.%s.pod" $name) "nodes" $pool "pod" (include "trainyard.shape.worker" (dict "chart" $ "pool" $pool "isRun" true))) -}}
{{- end -}}
{{- range $target := $targets -}}
  {{- $fields := include "trainyard.podRequirements.pinned" ($target.pod | fromYaml) | fromYaml | keys -}}
  {{- $pod := include "trainyard.pods.withSettings" (merge (dict "chart" $ "role" "ray") $target) | fromYaml -}}
  {{- $unpatched := include "trainyard.podRequirements.pinned" $pod | fromYaml -}}
  {{- $doubled := include "trainyard.podRequirements.doubled" $pod | fromYaml -}}
  {{- $special := ($target.nodes.pod | default dict).patch | default dict -}}
  {{- range $path, $patch := dict "pod" $values.pod.patch $target.path $special -}}
    {{- $before := list -}}
    {{- range concat $pod.spec.containers ($pod.spec.initContainers | default list) -}}
      {{- $before = append $before .name -}}
    {{- end -}}
    {{- range $key := list "containers" "initContainers" -}}
      {{- range get (($patch | default dict).spec | default dict) $key | default list -}}
        {{- if not (and (kindIs "map" .) (has (get . "name") $before)) -}}
          {{- $problems = append $problems (printf "%s.patch.spec.%s contains a container that the pod does not have. Its containers are %s. Add others with initContainers or sidecars." $path $key (join ", " $before)) -}}
        {{- end -}}
      {{- end -}}
    {{- end -}}
    {{- if not $problems -}}
      {{- $patched := deepCopy $pod -}}
      {{- include "trainyard.pods.patch" (dict "into" $patched "patch" ($patch | default dict)) -}}
      {{- range $field, $keys := include "trainyard.podRequirements.doubled" $patched | fromYaml -}}
        {{- if not (hasKey $doubled $field) -}}
          {{- $problems = append $problems (printf "%s.patch gives %s both %s, of which Kubernetes permits only one. Delete the other one with null in the patch." $path $field $keys) -}}
        {{- end -}}
      {{- end -}}
      {{- $patched = include "trainyard.podRequirements.pinned" $patched | fromYaml -}}
      {{- range $field := $fields | sortAlpha -}}
        {{- if ne (get $patched $field) (get $unpatched $field) -}}
          {{- $problems = append $problems (printf "%s.patch changes %s, which trainyard sets. Remove that from the patch." $path $field) -}}
        {{- end -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
  {{- if not $problems -}}
    {{- $patched := deepCopy $pod -}}
    {{- include "trainyard.pods.patch" (dict "into" $patched "patch" ($values.pod.patch | default dict)) -}}
    {{- range $key := list "containers" "initContainers" -}}
      {{- $left := list -}}
      {{- range get $patched.spec $key | default list -}}
        {{- $left = append $left .name -}}
      {{- end -}}
      {{- range get ($special.spec | default dict) $key | default list -}}
        {{- if not (has .name $left) -}}
          {{- $problems = append $problems (printf "%s.patch.spec.%s contains %s, which pod.patch removes. Remove it from one of the two patches." $target.path $key .name) -}}
        {{- end -}}
      {{- end -}}
    {{- end -}}
    {{- include "trainyard.pods.patch" (dict "into" $patched "patch" $special) -}}
    {{- range $field, $keys := include "trainyard.podRequirements.doubled" $patched | fromYaml -}}
      {{- if not (hasKey $doubled $field) -}}
        {{- $problems = append $problems (printf "pod.patch and %s.patch together give %s both %s, of which Kubernetes permits only one. Delete the other one with null in %s.patch." $target.path $field $keys $target.path) -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- toYaml (uniq $problems) -}}
{{- end }}

{{/*
Fields of a pod that have two values where Kubernetes permits one, by path, with the names of these values: sources of a volume
or of a variable, actions of a probe or of a lifecycle hook. Patches are merged, so two of them can set one each. The argument
is the template of a pod.
*/}}
{{- define "trainyard.podRequirements.doubled" -}}
{{- $fields := dict -}}
{{- range include "trainyard.podRequirements.maps" .spec.volumes | fromYamlArray -}}
  {{- $_ := set $fields (printf "spec.volumes.%s" .name) (omit . "name") -}}
{{- end -}}
{{- range $key := list "containers" "initContainers" -}}
  {{- range $container := include "trainyard.podRequirements.maps" (get $.spec $key) | fromYamlArray -}}
    {{- $path := printf "spec.%s.%s" $key .name -}}
    {{- range include "trainyard.podRequirements.maps" .env | fromYamlArray -}}
      {{- $_ := set $fields (printf "%s.env.%s" $path .name) (pick . "value" "valueFrom") -}}
      {{- $_ := set $fields (printf "%s.env.%s.valueFrom" $path .name) .valueFrom -}}
    {{- end -}}
    {{- range $probe := list "livenessProbe" "readinessProbe" "startupProbe" -}}
      {{- with get $container $probe -}}
        {{- $_ := set $fields (printf "%s.%s" $path $probe) (pick . "exec" "httpGet" "tcpSocket" "grpc") -}}
      {{- end -}}
    {{- end -}}
    {{- range $hook, $action := .lifecycle -}}
      {{- $_ := set $fields (printf "%s.lifecycle.%s" $path $hook) $action -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- $doubled := dict -}}
{{- range $path, $values := $fields -}}
  {{- if and (kindIs "map" $values) (gt (len ($values | default dict)) 1) -}}
    {{- $_ := set $doubled $path (keys $values | sortAlpha | join " and ") -}}
  {{- end -}}
{{- end -}}
{{- toYaml $doubled -}}
{{- end }}

{{/* The maps of a list as a YAML list, which is empty for another value than a list. */}}
{{- define "trainyard.podRequirements.maps" -}}
{{- $maps := list -}}
{{- if kindIs "slice" . -}}
  {{- range . -}}
    {{- if kindIs "map" . -}}
      {{- $maps = append $maps . -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- toYaml $maps -}}
{{- end }}

{{/* The fields of a Ray pod that launcher, operator and trainer rely on, by path. The argument is the template of a pod. */}}
{{- define "trainyard.podRequirements.pinned" -}}
{{- $fields := dict -}}
{{- $metadata := .metadata | default dict -}}
{{- range $key := list "labels" "annotations" -}}
  {{- range $name, $value := get $metadata $key | default dict -}}
    {{- if include "trainyard.podRequirements.isReservedKey" $name -}}
      {{- $_ := set $fields (printf "metadata.%s.%s" $key $name) $value -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- with include "trainyard.pods.nodeTerms" .spec.affinity | fromYamlArray -}}
  {{- $_ := set $fields "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution" (toJson .) -}}
{{- end -}}
{{- $container := dict -}}
{{- if kindIs "slice" .spec.containers -}}
  {{- $container = first .spec.containers | default dict -}}
{{- end -}}
{{- range $key := list "name" "image" "command" "args" "resources" "ports" "lifecycle" -}}
  {{- $_ := set $fields (printf "spec.containers[0].%s" $key) (get $container $key | toJson) -}}
{{- end -}}
{{- range $container.env -}}
  {{- $_ := set $fields (printf "spec.containers[0].env.%s" .name) (toJson .) -}}
{{- end -}}
{{- if kindIs "slice" .spec.volumes -}}
  {{- range .spec.volumes -}}
    {{- $_ := set $fields (printf "spec.volumes.%s" .name) (toJson .) -}}
  {{- end -}}
{{- end -}}
{{- if kindIs "slice" $container.volumeMounts -}}
  {{- range $container.volumeMounts -}}
    {{- $_ := set $fields (printf "spec.containers[0].volumeMounts.%s" .mountPath) (toJson .) -}}
  {{- end -}}
{{- end -}}
{{- toYaml $fields -}}
{{- end }}
