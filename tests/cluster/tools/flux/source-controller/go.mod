module trainyard/tests/cluster/tools/flux/source-controller

go 1.26.0

// Its custom resource definitions; nothing is built of it, since a module that it needs cannot be downloaded.
require github.com/fluxcd/source-controller v1.9.6
