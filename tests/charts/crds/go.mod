module trainyard/tests/charts/crds

go 1.26.0

// What the tests read CRDs from, and nothing is built of; `go -C tests/charts/crds mod download` brings it.
require (
	github.com/prometheus-operator/prometheus-operator v0.85.0
)
