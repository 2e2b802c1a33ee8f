"""Amounts as Kubernetes writes them, and what a pod asks for: exactly."""

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
    """An amount as Kubernetes writes it, exactly: `100m`, `1.5Gi`, `2e3`, `64`. Raises ValueError."""
    found = QUANTITY.fullmatch(str(text))
    if found is None or (found["suffix"] or "") not in SUFFIXES:
        raise ValueError(f"{text!r} is no quantity")
    number = Fraction(found["number"])
    if found["power"] is not None:
        return number * Fraction(10) ** int(found["power"])
    return number * SUFFIXES[found["suffix"] or ""]


def shown(amount: Fraction) -> str:
    """An amount for people: `8`, `2.5`."""
    return f"{amount}" if amount.denominator == 1 else f"{float(amount):g}"


def requests_of(pod_spec: Object) -> Amounts:
    """What the scheduler keeps for a pod: its containers, or the largest of its init containers."""
    total: Amounts = {}
    for container in pod_spec.get("containers") or []:
        total = sum_of(total, requests_in(container))
    sidecars: Amounts = {}
    largest: Amounts = {}
    for container in pod_spec.get("initContainers") or []:
        own = requests_in(container)
        if container.get("restartPolicy") == "Always":
            # It stays beside the containers, and beside the init containers after it.
            sidecars = sum_of(sidecars, own)
            own = {}
        largest = _largest(largest, sum_of(sidecars, own))
    total = _largest(sum_of(total, sidecars), largest)
    # A pod's own numbers, where it has some, stand for those of its containers.
    total |= requests_in(pod_spec)
    return sum_of(total, amounts_of(pod_spec.get("overhead")))


def requests_in(holder: Object) -> Amounts:
    """What the `resources` of a container, or of a pod, ask for."""
    resources = holder.get("resources") or {}
    # A template may name limits alone; the API server takes them for requests, too.
    return amounts_of(resources.get("limits")) | amounts_of(resources.get("requests"))


def amounts_of(quantities: Mapping[str, Any] | None) -> Amounts:
    """Quantities, parsed."""
    return {name: quantity(text) for name, text in (quantities or {}).items()}


def sum_of(one: Amounts, other: Amounts) -> Amounts:
    """Both together."""
    return {name: one.get(name, Fraction(0)) + other.get(name, Fraction(0)) for name in one | other}


def difference(one: Amounts, other: Amounts) -> Amounts:
    """What is left of the one."""
    return {name: amount - other.get(name, Fraction(0)) for name, amount in one.items()}


def _largest(one: Amounts, other: Amounts) -> Amounts:
    return {
        name: max(one.get(name, Fraction(0)), other.get(name, Fraction(0))) for name in one | other
    }


def shown_size(resource: str, amount: Fraction) -> str:
    """An amount with its unit: memory and disk in GiB."""
    if resource in ("memory", "ephemeral-storage") or resource.startswith("hugepages-"):
        return f"{float(amount / 2**30):.4g} GiB"
    return shown(amount)
