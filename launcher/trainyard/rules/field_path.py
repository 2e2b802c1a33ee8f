"""A place in a parsed object: its path, and what stands there, whatever the object's author wrote.

Rules read foreign objects through it. What has the wrong type reads as absent, for the API server
refuses that by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]
Kuberay = Literal["1.6", "1.7"]

SHOWN_LIMIT = 80
"""Characters of a value that a finding shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """One broken rule, at one place."""

    rule: str
    """The rule's name, the same in each release."""
    path: str
    value: str
    problem: str
    remedy: str
    severity: Severity

    def __str__(self) -> str:
        return f"{self.path} = {self.value}: {self.problem}. {self.remedy}"


@dataclass(frozen=True, slots=True)
class FieldPath:
    """A value and the path that leads to it."""

    path: str
    value: Any

    def at(self, *keys: str) -> FieldPath:
        """The place below; its value is None where nothing is."""
        here = self
        for key in keys:
            inner = here.value.get(key) if isinstance(here.value, dict) else None
            path = f"{here.path}.{key}" if "/" not in key else f"{here.path}[{key}]"
            here = FieldPath(path.lstrip("."), inner)
        return here

    def items(self) -> Iterator[FieldPath]:
        """The places of a list, each that is a mapping."""
        for index, item in enumerate(self.value if isinstance(self.value, list) else ()):
            if isinstance(item, dict):
                yield FieldPath(f"{self.path}[{index}]", item)

    def entries(self) -> Iterator[tuple[str, FieldPath]]:
        """Key and place of a mapping's values."""
        for key in self.value if isinstance(self.value, dict) else ():
            yield str(key), self.at(str(key))

    @property
    def is_set(self) -> bool:
        return self.value is not None

    @property
    def is_true(self) -> bool:
        return self.value is True

    @property
    def text(self) -> str:
        """The text, or "" where there is none."""
        return self.value if isinstance(self.value, str) else ""

    @property
    def number(self) -> int | None:
        """The whole number, or None where there is none."""
        is_number = isinstance(self.value, int) and not isinstance(self.value, bool)
        return self.value if is_number else None

    @property
    def version(self) -> tuple[int, ...] | None:
        """The numbers at the head of a version, read as KubeRay does: `2.52.0rc1` -> (2, 52, 0)."""
        found = re.match(r"\s*v?(\d+(?:\.\d+)+)", self.text)
        parts = found[1].split(".") if found else []
        if not parts or any(len(part) > 1 and part.startswith("0") for part in parts):
            return None
        return tuple(int(part) for part in parts)

    def breaks(
        self, rule: str, problem: str, remedy: str, severity: Severity = "error"
    ) -> Violation:
        """The finding that a rule is broken here."""
        value = "nothing" if self.value is None else repr(self.value)
        shown = value if len(value) <= SHOWN_LIMIT else f"{value[:SHOWN_LIMIT]}..."
        return Violation(
            rule=rule,
            path=self.path,
            value=shown,
            problem=problem,
            remedy=remedy,
            severity=severity,
        )
