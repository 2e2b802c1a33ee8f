{{/* Ports of Ray that pods declare and NetworkPolicies allow. They are Ray's and KubeRay's defaults. */}}

{{/* The dashboard, to which the operator submits jobs. */}}
{{- define "trainyard.ports.dashboard" -}}
8265
{{- end }}

{{/* The Prometheus metrics of every Ray node. */}}
{{- define "trainyard.ports.metrics" -}}
8080
{{- end }}
