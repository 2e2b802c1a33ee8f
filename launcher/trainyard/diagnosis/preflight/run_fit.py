"""Checks of one run: whether the API server accepts its RayJob, whether the data volumes and Secrets that it
names exist, and whether quota and nodes suffice."""

from __future__ import annotations

from collections.abc import Iterator

from trainyard.diagnosis.preflight.facts import RECEIVER, Check, ClusterFacts
from trainyard.planning.capacity.fit import capacity_rows, fit_groups
from trainyard.planning.capacity.nodes import nodes_of
from trainyard.planning.capacity.quota import over_quota
from trainyard.platform import DataVolume
from trainyard_trainer.config.variables import SecretKey
from trainyard_trainer.run_files.standing_cluster import standing_cluster_of

SHARED_MODES = {"ReadOnlyMany", "ReadWriteMany"}
"""Access modes of volumes that pods on several nodes can mount."""


def check_rayjob(facts: ClusterFacts) -> Iterator[Check]:
    """Check that the API server accepts the RayJob in a dry run; without a run file there is no check."""
    if facts.job is None or facts.missing_kinds:
        return
    name = "RayJob"
    if facts.job_refused:
        yield Check(
            name=name,
            state="failed",
            seen=facts.job_refused,
            remedy="Correct what the message names: the API server would refuse the run.",
        )
    else:
        yield Check(
            name=name,
            state="ok",
            seen=f"the API server would accept {facts.job['metadata']['name']} (dry run)",
        )


def check_volumes(facts: ClusterFacts) -> Iterator[Check]:
    """Check the claims of the data volumes that the run mounts: each exists, is bound and can be shared."""
    for data in facts.volumes:
        if data.claim is None:
            seen = f"{data.source}: not checked before the pods start"
            yield Check(name=f"volume {data.name}", state="not known", seen=seen)
        else:
            yield _check_data_claim(facts, data, data.claim)


def _check_data_claim(facts: ClusterFacts, data: DataVolume, claim: str) -> Check:
    name = f"volume {data.name}"
    if claim not in facts.claims:
        return Check(name=name, state="not known", seen=f"no permission to read claim {claim}")
    found = facts.claims[claim]
    if found is None:
        return Check(
            name=name,
            state="failed",
            seen=f"claim {claim} does not exist in namespace {facts.namespace}",
            remedy=f"Create it, or correct data.volumes.{data.name}.claim of the chart.",
        )
    phase = found.get("status", {}).get("phase", "Pending")
    modes = found.get("status", {}).get("accessModes") or found["spec"].get("accessModes") or []
    shown = f"claim {claim} is {phase}, {', '.join(modes)}"
    if not set(modes) & SHARED_MODES and ("ReadWriteOncePod" in modes or _has_nodes(facts)):
        return Check(
            name=name,
            state="failed",
            seen=f"{shown}: only one node can mount it, and the pods of a run are on several",
            remedy="Use a claim with ReadOnlyMany or ReadWriteMany.",
        )
    if phase != "Bound":
        return Check(
            name=name,
            state="failed" if phase == "Lost" else "not known",
            seen=shown,
            remedy=f"Look at `kubectl describe pvc {claim} -n {facts.namespace}`: a claim whose class waits "
            "for its first pod (WaitForFirstConsumer) is bound when the run starts.",
        )
    return Check(name=name, state="ok", seen=shown)


def _has_nodes(facts: ClusterFacts) -> bool:
    """Whether the cluster has more than one node, as far as that is known."""
    return facts.nodes is None or len(facts.nodes) > 1


def check_secrets(facts: ClusterFacts) -> Iterator[Check]:
    """Check that each Secret that the run file refers to exists and has the key."""
    for variable, secret in facts.secrets.items():
        yield _check_secret(facts, variable, secret)


def _check_secret(facts: ClusterFacts, variable: str, secret: SecretKey) -> Check:
    name = f"secret {variable}"
    path = variable if variable == RECEIVER else f"secrets.{variable}"
    if secret.name not in facts.secret_keys:
        seen = f"no permission to read Secret {secret.name}"
        return Check(name=name, state="not known", seen=seen)
    keys = facts.secret_keys[secret.name]
    if keys is None:
        return Check(
            name=name,
            state="failed",
            seen=f"Secret {secret.name} does not exist in namespace {facts.namespace}",
            remedy=f"Create it with the key {secret.key}, or correct {path}.name of the run file.",
        )
    if secret.key not in keys:
        known = ", ".join(sorted(keys)) or "none"
        return Check(
            name=name,
            state="failed",
            seen=f"Secret {secret.name} has no key {secret.key}; its keys: {known}",
            remedy=f"Add the key to the Secret, or correct {path}.key of the run file.",
        )
    return Check(name=name, state="ok", seen=f"Secret {secret.name} has the key {secret.key}")


def check_quota(facts: ClusterFacts) -> Check:
    """Check that the run's smallest size fits into the ResourceQuotas of the namespace."""
    name = "quota"
    if facts.quotas is None:
        return Check(name=name, state="not known", seen="no permission to read ResourceQuotas")
    names = ", ".join(quota["metadata"]["name"] for quota in facts.quotas)
    if not names:
        return Check(name=name, state="ok", seen="the namespace has no ResourceQuota")
    if facts.job is None:
        return Check(
            name=name,
            state="not known",
            seen=f"ResourceQuota {names}",
            remedy="Pass a run file to compare its pods with the quota.",
        )
    short = list(over_quota(facts.job, facts.quotas))
    if short:
        return Check(
            name=name,
            state="failed",
            seen="; ".join(short),
            remedy="Ask for less (--gpus, --workers), stop another run, or have the quota raised.",
        )
    return Check(name=name, state="ok", seen=f"the run fits into {names}")


def check_nodes(facts: ClusterFacts) -> Check:
    """Check that the run's pods fit on the nodes."""
    name = "nodes"
    if facts.nodes is None:
        return Check(name=name, state="not known", seen="no permission to read nodes")
    if facts.job is None:
        return Check(
            name=name,
            state="not known",
            seen=_gpus_of_pools(facts),
            remedy="Pass a run file to see whether its pods fit on the nodes.",
        )
    if standing_cluster_of(facts.job) is not None:
        return Check(name=name, state="ok", seen="the run uses the pods of the standing cluster")
    fits = fit_groups(facts.job, nodes_of(facts.nodes, facts.pods or ()))
    seen = "; ".join(f"{row.name}: {row.value}, {row.why}" for row in capacity_rows(fits))
    if any(not fit.can_ever_fit for fit in fits):
        return Check(
            name=name,
            state="failed",
            seen=seen,
            remedy="Ask for less (--gpus, --workers) or for another pool, or correct the pool's numbers in "
            "the platform's values. Nodes that an autoscaler could add are not counted.",
        )
    if any(fit.fit_now < fit.group.min_pods for fit in fits):
        return Check(
            name=name,
            state="not known",
            seen=seen,
            remedy="The run waits until enough is free: `trainyard gpus` shows which pods use the GPUs.",
        )
    if facts.pods is None:
        seen += "; no permission to read the pods there"
    return Check(name=name, state="ok", seen=seen)


def _gpus_of_pools(facts: ClusterFacts) -> str:
    """Return how many GPUs of each pool the nodes have, as text."""
    nodes = facts.nodes or ()
    parts = [f"{len(nodes)} nodes"]
    for pool in facts.platform.pools if facts.platform else ():
        if pool.gpu_resource is not None:
            counts = [
                int(node.get("status", {}).get("allocatable", {}).get(pool.gpu_resource, "0"))
                for node in nodes
            ]
            having = [count for count in counts if count]
            parts.append(f"pool {pool.name}: {sum(having)} {pool.gpu_resource} on {len(having)}")
    return "; ".join(parts)
