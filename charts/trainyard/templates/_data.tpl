{{/*
Named data volumes. A run mounts those that its run file names, and the standing RayCluster mounts all of them.
*/}}

{{/* All data volumes as a YAML list of {name, volume, mount}: the volume of a pod, and its mount in the Ray container. */}}
{{- define "trainyard.data.volumes" -}}
{{- $volumes := list -}}
{{- range $name, $data := .Values.data.volumes -}}
  {{- $volume := printf "data-%s" $name -}}
  {{- $readOnly := ne (toString $data.readOnly) "false" -}}
  {{- $source := omit $data "claim" "mountPath" "readOnly" -}}
  {{- with $data.claim -}}
    {{- $_ := set $source "persistentVolumeClaim" (dict "claimName" . "readOnly" $readOnly) -}}
  {{- end -}}
  {{- $mount := dict "name" $volume "mountPath" $data.mountPath "readOnly" $readOnly -}}
  {{- $volumes = append $volumes (dict "name" $name "volume" (merge (dict "name" $volume) $source) "mount" $mount) -}}
{{- end -}}
{{- toYaml $volumes -}}
{{- end }}

{{/* One part of each data volume as a YAML list. Arguments: chart; part: volume or mount. */}}
{{- define "trainyard.data.part" -}}
{{- $parts := list -}}
{{- range include "trainyard.data.volumes" .chart | fromYamlArray -}}
  {{- $parts = append $parts (get . $.part) -}}
{{- end -}}
{{- toYaml $parts -}}
{{- end }}

{{/* Problems of the data volumes, as a YAML list of sentences. */}}
{{- define "trainyard.data.requirements" -}}
{{- $problems := list -}}
{{- $mounts := dict -}}
{{- range $path := list "/" "/tmp" "/dev/shm" (include "trainyard.shape.home" .) "/var/run/secrets/kubernetes.io/serviceaccount" -}}
  {{- $_ := set $mounts $path "other files of the pods" -}}
{{- end -}}
{{- with .Values.storage.claim -}}
  {{- $_ := set $mounts (clean .mountPath) "storage.claim" -}}
{{- end -}}
{{- range $name, $data := .Values.data.volumes -}}
  {{- $sources := omit $data "mountPath" "readOnly" | keys | sortAlpha -}}
  {{- if ne (len $sources) 1 -}}
    {{- $problems = append $problems (printf "data.volumes.%s has %d sources (%s), but a volume has one. Set claim, or one volume source of Kubernetes such as csi." $name (len $sources) (join ", " $sources)) -}}
  {{- end -}}
  {{- $mountPath := clean $data.mountPath -}}
  {{- with get $mounts $mountPath -}}
    {{- $problems = append $problems (printf "data.volumes.%s.mountPath is %s, the path of %s. Use another path." $name $mountPath .) -}}
  {{- end -}}
  {{- $_ := set $mounts $mountPath (printf "data.volumes.%s" $name) -}}
{{- end -}}
{{- toYaml $problems -}}
{{- end }}
