{{/*
Sizes of heads and nodes. Pods, quotas of queues and the platform's ConfigMap all use these templates. The launcher
computes the sizes of a run's pods itself, from the numbers in the ConfigMap.
*/}}

{{/* The numbers of a pool with defaults for omitted keys. The argument is a pool of the values. */}}
{{- define "trainyard.sizes.pool" -}}
gpusPerNode: {{ int .gpusPerNode }}
{{- if .gpusPerNode }}
gpuResource: {{ .gpuResource | default "nvidia.com/gpu" | quote }}
{{- with .gpuMemoryGib }}
gpuMemoryGib: {{ int . }}
{{- end }}
{{- else }}
workersPerNode: {{ int .workersPerNode }}
{{- end }}
cpus: {{ .cpus }}
cpuRequest: {{ .cpuRequest | default .cpus }}
memoryGib: {{ int .memoryGib }}
{{- with .ephemeralStorageGib }}
ephemeralStorageGib: {{ int . }}
{{- end }}
{{- with .network }}
network:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/*
The sum of the sizes of several heads whose runs have this many workers together.
Arguments: head of the values, count, workers.
*/}}
{{- define "trainyard.sizes.heads" -}}
{{- $moreCpus := div .workers .head.workersPerCpu -}}
cpus: {{ addf (mulf .count .head.cpus) $moreCpus }}
cpuRequest: {{ addf (mulf .count .head.cpuRequest) $moreCpus }}
memoryMib: {{ add (mul .count .head.memoryGib 1024) (mul .workers .head.memoryMibPerWorker) }}
{{- end }}

{{/*
Resources of a container. The argument is a size: cpus, cpuRequest, memoryGib or memoryMib, and optionally
gpusPerNode with gpuResource, and ephemeralStorageGib.
*/}}
{{- define "trainyard.sizes.resources" -}}
requests:
  {{- include "trainyard.sizes.quantities" (dict "size" . "count" 1 "cpus" .cpuRequest) | nindent 2 }}
limits:
  {{- include "trainyard.sizes.quantities" (dict "size" . "count" 1 "cpus" .cpus) | nindent 2 }}
{{- end }}

{{/* Quantities by resource name of several pods of one size. Arguments: size, count, and cpus of one pod. */}}
{{- define "trainyard.sizes.quantities" -}}
cpu: {{ mulf .count .cpus | toString | quote }}
{{- if .size.memoryGib }}
memory: {{ mul .count .size.memoryGib }}Gi
{{- else }}
memory: {{ mul .count .size.memoryMib }}Mi
{{- end }}
{{- with .size.ephemeralStorageGib }}
ephemeral-storage: {{ mul $.count . }}Gi
{{- end }}
{{- if .size.gpusPerNode }}
{{ .size.gpuResource }}: {{ mul .count .size.gpusPerNode | toString | quote }}
{{- end }}
{{- end }}

{{/*
Devices of a pool's network and the huge pages that they need, for several nodes: quantities by resource name, or an
empty map. The launcher adds the same to worker pods. Arguments: network of the pool, count.
*/}}
{{- define "trainyard.sizes.devices" -}}
{{- $devices := dict -}}
{{- $count := .count -}}
{{- with .network -}}
  {{- $device := .resource | default (ternary "vpc.amazonaws.com/efa" "" (eq .preset "efa")) -}}
  {{- if $device -}}
    {{- $_ := set $devices $device (mul $count (.devicesPerNode | default 1) | toString) -}}
  {{- end -}}
  {{- if eq .preset "efa" -}}
    {{- $_ := set $devices "hugepages-2Mi" (printf "%dMi" (mul $count 5120)) -}}
  {{- end -}}
{{- end -}}
{{- toYaml $devices -}}
{{- end }}

{{/*
The further resources of several pods, which `pod.resources` and the more special values set: quantities by resource name, or
an empty map. Arguments: chart; nodes: the head or a pool of the values; count.
*/}}
{{- define "trainyard.sizes.further" -}}
{{- $quantities := dict -}}
{{- $count := .count -}}
{{- range $name, $quantity := (include "trainyard.pods.settings" . | fromYaml).resources -}}
  {{- $unit := regexFind "[A-Za-z]*$" $quantity -}}
  {{- $_ := set $quantities $name (printf "%d%s" (mul $count (trimSuffix $unit $quantity)) $unit) -}}
{{- end -}}
{{- toYaml $quantities -}}
{{- end }}
