{{/*
The newest apiVersion of Kueue that the cluster serves for a kind, or an empty string without Kueue. The fields that the
chart uses are the same in both versions. Arguments: chart, kind.
*/}}
{{- define "trainyard.kueue.apiVersion" -}}
{{- $kind := .kind -}}
{{- $apis := .chart.Capabilities.APIVersions -}}
{{- $served := list -}}
{{- range $version := list "kueue.x-k8s.io/v1beta2" "kueue.x-k8s.io/v1beta1" -}}
  {{- if $apis.Has (printf "%s/%s" $version $kind) -}}
    {{- $served = append $served $version -}}
  {{- end -}}
{{- end -}}
{{- with $served }}{{ first . }}{{ end -}}
{{- end }}
