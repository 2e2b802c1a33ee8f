{{/* The name of every object of this chart. They are fixed, since the launcher looks for them: one release per namespace. */}}

{{- define "trainyard.names.platform" -}}
trainyard-platform
{{- end }}

{{- define "trainyard.names.rayCluster" -}}
trainyard
{{- end }}

{{- define "trainyard.names.launcherRole" -}}
trainyard-launcher
{{- end }}

{{- define "trainyard.names.serviceAccount" -}}
{{ .Values.serviceAccount.name }}
{{- end }}

{{- define "trainyard.names.claim" -}}
{{ .Values.storage.claim.name }}
{{- end }}
