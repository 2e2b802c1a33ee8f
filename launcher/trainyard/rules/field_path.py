"""A field of a parsed object: its path and its value.

Rules read any object through it, whatever its author wrote. A value of the wrong type counts as absent in a
rule; the rule of the schema reports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]
Kuberay = Literal["1.6", "1.7"]

SHOWN_LIMIT = 80
"""The number of characters of a value that a violation shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """A violated rule, and the field that violates it."""

    rule: str
    """Name of the rule. It does not change between releases."""
    path: str
    value: str
    problem: str
    remedy: str
    severity: Severity

    def __str__(self) -> str:
        return f"{self.path} = {self.value}: {self.problem}. {self.remedy}"


@dataclass(frozen=True, slots=True)
class FieldPath:
    """The path of a field and its value."""

    path: str
    value: Any

    def at(self, *keys: str) -> FieldPath:
        """Return the field at these keys below this one. Its value is None if it is not set."""
        here = self
        for key in keys:
            inner = here.value.get(key) if isinstance(here.value, dict) else None
            path = f"{here.path}.{key}" if "/" not in key else f"{here.path}[{key}]"
            here = FieldPath(path.lstrip("."), inner)
        return here

    def items(self) -> Iterator[FieldPath]:
        """Yield the items of a list that are mappings."""
        for index, item in enumerate(self.value if isinstance(self.value, list) else ()):
            if isinstance(item, dict):
                yield FieldPath(f"{self.path}[{index}]", item)

    def entries(self) -> Iterator[tuple[str, FieldPath]]:
        """Yield the keys of a mapping and the fields with their values."""
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
        """The value if it is a string, or an empty string."""
        return self.value if isinstance(self.value, str) else ""

    @property
    def number(self) -> int | None:
        """The value if it is an integer, or None."""
        is_number = isinstance(self.value, int) and not isinstance(self.value, bool)
        return self.value if is_number else None

    @property
    def version(self) -> tuple[int, ...] | None:
        """The numbers at the beginning of a version, parsed as KubeRay does: `2.52.0rc1` -> (2, 52, 0)."""
        found = re.match(r"\s*v?(\d+(?:\.\d+)+)", self.text)
        parts = found[1].split(".") if found else []
        if not parts or any(len(part) > 1 and part.startswith("0") for part in parts):
            return None
        return tuple(int(part) for part in parts)

    def breaks(
        self, rule: str, problem: str, remedy: str, severity: Severity = "error"
    ) -> Violation:
        """Return the violation of a rule by this field."""
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
