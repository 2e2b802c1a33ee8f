"""Whether a run fits on the nodes of a cluster: now, and if nothing else ran there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from trainyard.errors import ConfigError
from trainyard.planning.capacity.nodes import GPU, Node, accepts, count_fitting_pods
from trainyard.planning.reasons import Reason
from trainyard.planning.sizing.layout import count
from trainyard.quantities import (
    Amounts,
    Object,
    difference,
    requests_in,
    requests_of,
    shown_size,
    sum_of,
)
from trainyard_trainer.run_files.standing_cluster import standing_cluster_of

NAMES_SHOWN = 3
"""How many nodes of a group an error message names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodGroup:
    """A group of equal pods of a run."""

    name: str
    """The name of the worker group, or `head`."""
    pod_spec: Object
    request: Amounts
    """The resources that one pod reserves."""
    min_pods: int
    max_pods: int


def pod_groups_of(job: Object) -> tuple[PodGroup, ...]:
    """Return the groups of equal pods of a rendered RayJob: worker groups first, then the head.

    A run on a standing RayCluster has no pods of its own.
    """
    if standing_cluster_of(job) is not None:
        return ()
    spec = job["spec"]["rayClusterSpec"]
    groups = [
        _pod_group(group["groupName"], group, group["minReplicas"], group["maxReplicas"])
        for group in spec["workerGroupSpecs"]
    ]
    head = _pod_group("head", spec["headGroupSpec"], 1, 1)
    if spec.get("enableInTreeAutoscaling"):
        # KubeRay adds the autoscaler's container to the head pod.
        autoscaler = requests_in(spec.get("autoscalerOptions") or {})
        head = replace(head, request=sum_of(head.request, autoscaler))
    return (*groups, head)


def _pod_group(name: str, group: Object, min_pods: int, max_pods: int) -> PodGroup:
    pod_spec = group["template"]["spec"]
    return PodGroup(
        name=name,
        pod_spec=pod_spec,
        request=requests_of(pod_spec),
        min_pods=min_pods,
        max_pods=max_pods,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFit:
    """How many pods of one group fit on the nodes."""

    group: PodGroup
    num_matching: int
    """Number of nodes that node selector, node affinity, taints and tolerations allow."""
    num_closed: int
    """Number of matching nodes that are cordoned or not ready."""
    fit_if_idle: int
    """Number of pods that would fit if nothing else ran."""
    fit_now: int
    """Number of pods that fit now, beside the run's other pods; at most the group's largest size."""
    lacking: tuple[str, ...]
    """Names of the resources that are too scarce now on nodes where a pod would fit if nothing else ran."""
    misfits: tuple[str, ...]
    """Descriptions of nodes that are too small for one pod."""

    @property
    def can_ever_fit(self) -> bool:
        """Whether the group's smallest size would fit if nothing else ran."""
        return self.fit_if_idle >= self.group.min_pods


def fit_groups(job: Object, nodes: Sequence[Node]) -> tuple[GroupFit, ...]:
    """Return how many pods of each group of a rendered RayJob fit on the nodes."""
    free = {node.name: node.free() for node in nodes if node.is_open}
    return tuple(_fit_group(group, nodes, free) for group in pod_groups_of(job))


def _fit_group(group: PodGroup, nodes: Sequence[Node], free: dict[str, Amounts]) -> GroupFit:
    """Place the pods of a group on the nodes, and subtract their requests from the free resources."""
    matching = [node for node in nodes if accepts(node, group.pod_spec)]
    placed, lacking = 0, set()
    for node in matching:
        if node.name not in free:
            continue
        fitting = min(count_fitting_pods(free[node.name], group.request), group.max_pods - placed)
        if not fitting and count_fitting_pods(node.without_jobs(), group.request):
            lacking |= {
                name
                for name, amount in group.request.items()
                if free[node.name].get(name, Fraction(0)) < amount
            }
        taken = {name: amount * fitting for name, amount in group.request.items()}
        free[node.name] = difference(free[node.name], taken | {"pods": Fraction(fitting)})
        placed += fitting
    return GroupFit(
        group=group,
        num_matching=len(matching),
        num_closed=sum(not node.is_open for node in matching),
        fit_if_idle=sum(
            count_fitting_pods(node.without_jobs(), group.request) for node in matching
        ),
        fit_now=placed,
        lacking=tuple(sorted(lacking)),
        misfits=_misfits(group, matching),
    )


def _misfits(group: PodGroup, matching: Sequence[Node]) -> tuple[str, ...]:
    """Describe which nodes are too small for one pod. For GPU pods, nodes without any GPU are left out."""
    gpus = [name for name in group.request if GPU.fullmatch(name)]
    too_small: dict[tuple[str, ...], list[str]] = {}
    for node in matching:
        if gpus and not any(node.allocatable.get(name) for name in gpus):
            continue
        usable = node.without_jobs()
        missing = tuple(
            f"{name} {shown_size(name, max(usable.get(name, Fraction(0)), Fraction(0)))}, "
            f"a pod needs {shown_size(name, amount)}"
            for name, amount in sorted(group.request.items())
            if usable.get(name, Fraction(0)) < amount
        )
        if missing:
            too_small.setdefault(missing, []).append(node.name)
    return tuple(
        f"{_nodes_text(names)} {'has' if len(names) == 1 else 'have'} {'; '.join(missing)}"
        for missing, names in too_small.items()
    )


def _nodes_text(names: Sequence[str]) -> str:
    """Return names of nodes as text, the first few of many."""
    few = ", ".join(names[:NAMES_SHOWN])
    if len(names) == 1:
        return f"node {few}"
    others = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{len(names)} nodes ({few}{others})"


def require_capacity(fits: Iterable[GroupFit]) -> None:
    """Raise ConfigError for a run that would not fit even if nothing else ran."""
    for fit in fits:
        if fit.can_ever_fit:
            continue
        group = fit.group
        sizes = ", ".join(
            f"{name} {shown_size(name, amount)}" for name, amount in sorted(group.request.items())
        )
        raise ConfigError(
            f"the run does not fit on the nodes of the cluster: {group.name} needs "
            f"{count(group.min_pods, 'pods')} with {sizes}; {count(fit.num_matching, 'nodes')} may run "
            f"them, and {fit.fit_if_idle} would fit if nothing else ran",
            *fit.misfits,
            "Ask for less, for another pool, or correct the pool's numbers in the chart's values. "
            "Nodes that the cluster's autoscaler could add are not counted.",
        )


def capacity_rows(fits: Iterable[GroupFit]) -> tuple[Reason, ...]:
    """Return rows for the plan: how many of the run's pods fit now, and what limits them."""
    return tuple(
        Reason(
            name=f"free now: {fit.group.name}",
            value=f"{min(fit.fit_now, fit.group.max_pods)} of {count(fit.group.max_pods, 'pods')}",
            why="; ".join(_limits(fit)),
        )
        for fit in fits
    )


def _limits(fit: GroupFit) -> list[str]:
    """Return clauses that say what limits the number of pods, and what that means for the run."""
    clauses = [
        f"{count(fit.num_matching, 'nodes')} may run these pods, "
        f"and {fit.fit_if_idle} would fit if nothing else ran"
    ]
    if fit.num_closed:
        clauses.append(f"{fit.num_closed} cordoned or not ready")
    if fit.fit_now < fit.group.min_pods:
        lacking = " and ".join(fit.lacking) or "of the resources"
        clauses.append(f"too little {lacking} is free now: the run waits")
    elif fit.fit_now < fit.group.max_pods:
        clauses.append("the run starts with fewer pods, and grows when resources become free")
    return [*clauses, *fit.misfits]
