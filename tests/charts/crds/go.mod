module trainyard/tests/charts/crds

go 1.26.0

// Holds the CRDs of PodMonitor and PrometheusRule; nothing of it is built.
require github.com/prometheus-operator/prometheus-operator v0.85.0
