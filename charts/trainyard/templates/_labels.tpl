{{/* Labels of all objects that the chart creates. They contain the chart's version, so nothing selects by them. */}}
{{- define "trainyard.labels" -}}
app.kubernetes.io/name: trainyard
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/*
Labels by which NetworkPolicy, PodMonitor and PodDisruptionBudget select the pods of this chart and of all runs.
Pods of running jobs keep their labels, so a change here stops selecting them.
*/}}
{{- define "trainyard.selectorLabels" -}}
app.kubernetes.io/part-of: trainyard
{{- end }}

{{/* The same for Ray heads only. KubeRay adds the second label to its pods. */}}
{{- define "trainyard.headSelectorLabels" -}}
{{ include "trainyard.selectorLabels" . }}
ray.io/node-type: head
{{- end }}

{{/* Labels of all pods of this chart and of all runs. Labels that no selector uses can be added here. */}}
{{- define "trainyard.podLabels" -}}
{{ include "trainyard.selectorLabels" . }}
{{- end }}

{{/* The label of the pods of the CronJob that reports the ends of runs. */}}
{{- define "trainyard.noticesSelectorLabels" -}}
trainyard.io/notices: "true"
{{- end }}

{{/* The label of the pods of the CronJob that publishes the progress of runs. */}}
{{- define "trainyard.progressSelectorLabels" -}}
trainyard.io/progress: "true"
{{- end }}

{{/* The label by which a prePull DaemonSet selects its pods. The argument is the name of the pool. */}}
{{- define "trainyard.prePullSelectorLabels" -}}
trainyard.io/prepull: {{ . | quote }}
{{- end }}
