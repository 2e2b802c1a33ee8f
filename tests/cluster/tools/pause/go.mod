module trainyard/tests/cluster/tools/pause

go 1.24.0
