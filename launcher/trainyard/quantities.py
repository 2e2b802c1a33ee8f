"""Kubernetes quantities such as `100m` and `1.5Gi`, and the resource requests of pods, as exact fractions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

Object = dict[str, Any]
Amounts = dict[str, Fraction]

BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", start=1)}
DECIMAL = {letter: 1000**power for power, letter in enumerate("kMGTPE", start=1)}
PARTS = {letter: Fraction(1, 1000**power) for power, letter in enumerate("mun", start=1)}
SUFFIXES: dict[str, Fraction] = {
    "": Fraction(1),
    **{suffix: Fraction(size) for suffix, size in (BINARY | DECIMAL).items()},
    **PARTS,
}
QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:[eE](?P<power>[+-]?[0-9]{1,3})|(?P<suffix>[A-Za-z]*))"
)


def quantity(text: str | int | float) -> Fraction:
    """Parse a Kubernetes quantity exactly: `100m`, `1.5Gi`, `2e3` or `64`. Raises ValueError."""
    found = QUANTITY.fullmatch(str(text))
    if found is None or (found["suffix"] or "") not in SUFFIXES:
        raise ValueError(f"{text!r} is not a quantity")
    number = Fraction(found["number"])
    if found["power"] is not None:
        return number * Fraction(10) ** int(found["power"])
    return number * SUFFIXES[found["suffix"] or ""]


def shown(amount: Fraction) -> str:
    """Return an amount as a decimal number for output: `8`, `2.5`."""
    return f"{amount}" if amount.denominator == 1 else f"{float(amount):g}"


def requests_of(pod_spec: Object) -> Amounts:
    """Return the resources that the scheduler reserves for a pod, as Kubernetes computes them.

    They are the sum of its containers, or its largest init container if that needs more.
    """
    total: Amounts = {}
    for container in pod_spec.get("containers") or []:
        total = sum_of(total, requests_in(container))
    sidecars: Amounts = {}
    largest: Amounts = {}
    for container in pod_spec.get("initContainers") or []:
        own = requests_in(container)
        if container.get("restartPolicy") == "Always":
            # A sidecar keeps running beside the containers and the init containers that follow it.
            sidecars = sum_of(sidecars, own)
            own = {}
        largest = _largest(largest, sum_of(sidecars, own))
    total = _largest(sum_of(total, sidecars), largest)
    # Resources at the level of the pod replace those of its containers.
    total |= requests_in(pod_spec)
    return sum_of(total, amounts_of(pod_spec.get("overhead")))


def requests_in(holder: Object) -> Amounts:
    """Return the requests in the `resources` of a container or a pod."""
    resources = holder.get("resources") or {}
    # Where a request is missing, the API server uses the limit as the request.
    return amounts_of(resources.get("limits")) | amounts_of(resources.get("requests"))


def amounts_of(quantities: Mapping[str, Any] | None) -> Amounts:
    """Parse the quantities of a mapping from resource name to quantity."""
    return {name: quantity(text) for name, text in (quantities or {}).items()}


def sum_of(one: Amounts, other: Amounts) -> Amounts:
    """Add two mappings from resource name to amount, resource by resource."""
    return {name: one.get(name, Fraction(0)) + other.get(name, Fraction(0)) for name in one | other}


def difference(one: Amounts, other: Amounts) -> Amounts:
    """Subtract the amounts of the second mapping from those of the first, for the resources of the first."""
    return {name: amount - other.get(name, Fraction(0)) for name, amount in one.items()}


def _largest(one: Amounts, other: Amounts) -> Amounts:
    return {
        name: max(one.get(name, Fraction(0)), other.get(name, Fraction(0))) for name in one | other
    }


def shown_size(resource: str, amount: Fraction) -> str:
    """Return an amount with its unit for output: memory and disk in GiB."""
    if resource in ("memory", "ephemeral-storage") or resource.startswith("hugepages-"):
        return f"{float(amount / 2**30):.4g} GiB"
    return shown(amount)
