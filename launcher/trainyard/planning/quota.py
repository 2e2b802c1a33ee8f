"""Whether the pods of a RayJob fit into the quotas of a namespace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

from trainyard.planning.capacity import needs_of
from trainyard.quantities import quantity, shown_size

Object = dict[str, Any]


def over_quota(job: Object, quotas: Iterable[Object]) -> Iterator[str]:
    """What a quota has not left for the fewest pods of a run: one line for each resource."""
    wanted = _wanted(job)
    for quota in quotas:
        spec, status = quota.get("spec") or {}, quota.get("status") or {}
        if spec.get("scopes") or spec.get("scopeSelector"):
            continue  # it counts only some pods, by priority or by deadline
        for name, hard in (status.get("hard") or {}).items():
            left = quantity(hard) - quantity((status.get("used") or {}).get(name, "0"))
            if wanted.get(name, Fraction(0)) > left:
                size = name.removeprefix("requests.").removeprefix("limits.")
                yield (
                    f"ResourceQuota {quota['metadata']['name']}: {name} "
                    f"{shown_size(size, wanted[name])} are wanted, "
                    f"{shown_size(size, max(left, Fraction(0)))} of {hard} are left"
                )


def _wanted(job: Object) -> dict[str, Fraction]:
    """By the names that a quota uses."""
    total: dict[str, Fraction] = {}

    def add(name: str, amount: Fraction) -> None:
        total[name] = total.get(name, Fraction(0)) + amount

    for need in needs_of(job):
        add("pods", Fraction(need.fewest))
        for name, each in need.request.items():
            add(name, each * need.fewest)
            add(f"requests.{name}", each * need.fewest)
        for container in need.pod_spec["containers"]:
            for name, limit in (container.get("resources", {}).get("limits") or {}).items():
                add(f"limits.{name}", quantity(limit) * need.fewest)
    return total
