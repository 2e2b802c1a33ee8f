{{/* The name of every object of this chart. They are fixed, since the launcher looks for them: one release per namespace. */}}

{{- define "trainyard.names.platform" -}}
trainyard-platform
{{- end }}

{{- define "trainyard.names.rayCluster" -}}
trainyard
{{- end }}

{{- define "trainyard.names.namespace" -}}
{{ .Release.Namespace }}
{{- end }}

{{- define "trainyard.names.launcherRole" -}}
trainyard-launcher
{{- end }}

{{/* Names of cluster-scoped objects, which therefore contain the namespace. */}}
{{- define "trainyard.names.launcherClusterRole" -}}
trainyard-launcher-{{ .Release.Namespace }}
{{- end }}

{{- define "trainyard.names.serviceAccount" -}}
{{ .Values.serviceAccount.name }}
{{- end }}

{{- define "trainyard.names.claim" -}}
{{ .Values.storage.claim.name }}
{{- end }}

{{- define "trainyard.names.networkPolicy" -}}
trainyard-runs
{{- end }}

{{- define "trainyard.names.headsNetworkPolicy" -}}
trainyard-heads
{{- end }}

{{- define "trainyard.names.localQueue" -}}
{{ .Values.queue.name }}
{{- end }}

{{- define "trainyard.names.clusterQueue" -}}
{{ .Values.queue.kueue.clusterQueue }}
{{- end }}

{{- define "trainyard.names.resourceQuota" -}}
trainyard
{{- end }}

{{- define "trainyard.names.limitRange" -}}
trainyard
{{- end }}

{{- define "trainyard.names.disruptionBudget" -}}
trainyard-heads
{{- end }}

{{- define "trainyard.names.podMonitor" -}}
trainyard-runs
{{- end }}

{{- define "trainyard.names.prometheusRule" -}}
trainyard-runs
{{- end }}

{{- define "trainyard.names.notices" -}}
trainyard-notices
{{- end }}

{{- define "trainyard.names.progress" -}}
trainyard-progress
{{- end }}

{{- define "trainyard.names.storageProbe" -}}
trainyard-probe-storage
{{- end }}

{{/* The name of one of several objects. The argument is its pool, its file or its own name. */}}

{{- define "trainyard.names.priorityClass" -}}
{{ .name }}
{{- end }}

{{- define "trainyard.names.resourceFlavor" -}}
{{ .name }}
{{- end }}

{{- define "trainyard.names.topology" -}}
{{ .name }}
{{- end }}

{{- define "trainyard.names.dashboard" -}}
trainyard-dashboard-{{ . }}
{{- end }}

{{- define "trainyard.names.prePull" -}}
trainyard-prepull-{{ . }}
{{- end }}

{{- define "trainyard.names.gpuProbe" -}}
trainyard-probe-{{ . }}
{{- end }}
