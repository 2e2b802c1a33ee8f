"""Check whether the pods of a RayJob fit into the ResourceQuotas of a namespace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

from trainyard.planning.capacity.fit import pod_groups_of
from trainyard.quantities import quantity, shown_size

Object = dict[str, Any]


def over_quota(job: Object, quotas: Iterable[Object]) -> Iterator[str]:
    """Yield a line for each resource of which a quota has too little left for the run's smallest size."""
    wanted = _requested(job)
    for quota in quotas:
        spec, status = quota.get("spec") or {}, quota.get("status") or {}
        if spec.get("scopes") or spec.get("scopeSelector"):
            continue  # This quota counts only some pods, for example those of one priority class.
        for name, hard in (status.get("hard") or {}).items():
            left = quantity(hard) - quantity((status.get("used") or {}).get(name, "0"))
            if wanted.get(name, Fraction(0)) > left:
                size = name.removeprefix("requests.").removeprefix("limits.")
                yield (
                    f"ResourceQuota {quota['metadata']['name']}: the run needs {name} "
                    f"{shown_size(size, wanted[name])}, "
                    f"{shown_size(size, max(left, Fraction(0)))} of {hard} are left"
                )


def _requested(job: Object) -> dict[str, Fraction]:
    """Return the resources of a run's smallest size, by the names that a ResourceQuota uses.

    A quota counts requests of CPU as `cpu` or `requests.cpu`, and limits as `limits.cpu`.
    """
    total: dict[str, Fraction] = {}

    def add(name: str, amount: Fraction) -> None:
        total[name] = total.get(name, Fraction(0)) + amount

    for group in pod_groups_of(job):
        add("pods", Fraction(group.min_pods))
        for name, amount in group.request.items():
            add(name, amount * group.min_pods)
            add(f"requests.{name}", amount * group.min_pods)
        for container in group.pod_spec["containers"]:
            for name, limit in (container.get("resources", {}).get("limits") or {}).items():
                add(f"limits.{name}", quantity(limit) * group.min_pods)
    return total
