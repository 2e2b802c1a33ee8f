{{/*
A CronJob that asks the API server, with a service account of its own. The other pods of the chart have no token.
Arguments: chart, name, rules of its Role, schedule, labels of its pods, command, args, env (YAML).
*/}}
{{- define "trainyard.cronJob" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .name }}
  labels:
    {{- include "trainyard.labels" .chart | nindent 4 }}
  {{- /* A cloud role, by which it reads and writes a bucket. */}}
  {{- with .chart.Values.serviceAccount.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ .name }}
  labels:
    {{- include "trainyard.labels" .chart | nindent 4 }}
rules:
  {{- toYaml .rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ .name }}
  labels:
    {{- include "trainyard.labels" .chart | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ .name }}
subjects:
  - kind: ServiceAccount
    name: {{ .name }}
    namespace: {{ .chart.Release.Namespace | quote }}
---
apiVersion: batch/v1
kind: CronJob
metadata:
  name: {{ .name }}
  labels:
    {{- include "trainyard.labels" .chart | nindent 4 }}
spec:
  schedule: {{ .schedule | quote }}
  {{- /* Two at once could send the same message, or publish the older state last. */}}
  concurrencyPolicy: Forbid
  startingDeadlineSeconds: 120
  successfulJobsHistoryLimit: 1
  failedJobsHistoryLimit: 1
  jobTemplate:
    spec:
      backoffLimit: 0
      activeDeadlineSeconds: 600
      template:
        {{- include "trainyard.pods.apply" (dict "chart" .chart "nodes" .chart.Values.head "role" "storage" "pod" (include "trainyard.cronJob.pod" .)) | nindent 8 }}
{{- if .chart.Values.security.networkPolicy.enabled }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ .name }}
  labels:
    {{- include "trainyard.labels" .chart | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- .labels | nindent 6 }}
  policyTypes: [Egress]
  egress:
    - to:
        {{- range .chart.Values.security.networkPolicy.apiServerCidrs }}
        - ipBlock: {cidr: {{ . | quote }}}
        {{- end }}
{{- end }}
{{- end }}

{{/* The pod template before what the values set for pods. */}}
{{- define "trainyard.cronJob.pod" -}}
metadata:
  labels:
    {{- include "trainyard.podLabels" .chart | nindent 4 }}
    {{- .labels | nindent 4 }}
spec:
  {{- $pod := include "trainyard.shape.pod" (dict "chart" .chart "nodes" .chart.Values.head) | fromYaml }}
  {{- $_ := set $pod "serviceAccountName" .name }}
  {{- $_ := set $pod "automountServiceAccountToken" true }}
  {{- toYaml $pod | nindent 2 }}
  restartPolicy: Never
  containers:
    - name: {{ trimPrefix "trainyard-" .name }}
      image: {{ .chart.Values.image | quote }}
      {{- include "trainyard.shape.container" .chart | nindent 6 }}
      command: {{ toJson .command }}
      {{- with .args }}
      args: {{ toJson . }}
      {{- end }}
      resources:
        requests: {cpu: 50m, memory: 256Mi}
        limits: {cpu: "1", memory: 1Gi}
      env:
        {{- include "trainyard.shape.env" .chart | nindent 8 }}
        {{- with .env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end }}
