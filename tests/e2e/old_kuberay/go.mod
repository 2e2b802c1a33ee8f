module trainyard/tests/e2e/old_kuberay

go 1.26.0

// The CRDs of a KubeRay that is too old; nothing is built of it.
require github.com/ray-project/kuberay/ray-operator v1.5.1
