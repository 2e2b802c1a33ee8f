"""Turn the facts of a cluster into checks: whether a run can work there, before it uses GPUs."""

from __future__ import annotations

from trainyard.diagnosis.preflight.facts import Check, ClusterFacts
from trainyard.diagnosis.preflight.installation import (
    check_cluster,
    check_kuberay,
    check_operator,
    check_platform,
    check_rights,
)
from trainyard.diagnosis.preflight.probe_pod import check_probe
from trainyard.diagnosis.preflight.run_fit import (
    check_nodes,
    check_quota,
    check_rayjob,
    check_secrets,
    check_volumes,
)


def checks(facts: ClusterFacts) -> list[Check]:
    """Return all checks of a cluster, each with the state `ok`, `failed` or `not known`."""
    if facts.silence:
        return [
            Check(
                name="cluster",
                state="failed",
                seen=facts.silence,
                remedy="Check KUBECONFIG and the network; `make cluster` starts a cluster on this machine.",
            )
        ]
    return [
        check_cluster(facts),
        check_kuberay(facts),
        check_operator(facts),
        check_rights(facts),
        check_platform(facts),
        *check_rayjob(facts),
        *check_volumes(facts),
        *check_secrets(facts),
        check_quota(facts),
        check_nodes(facts),
        *check_probe(facts),
    ]
