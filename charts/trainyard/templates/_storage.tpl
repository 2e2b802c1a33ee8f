{{/* The path below which the folders of runs are: a path in the pods, or s3://bucket/prefix. */}}
{{- define "trainyard.storage.path" -}}
{{- with .Values.storage.claim -}}
{{ .mountPath }}
{{- else -}}
{{ .Values.storage.s3.path }}
{{- end -}}
{{- end }}

{{/* The address of the S3 server; an empty string for a claim and for AWS. */}}
{{- define "trainyard.storage.endpoint" -}}
{{- if not .Values.storage.claim -}}
{{ .Values.storage.s3.endpoint }}
{{- end -}}
{{- end }}
