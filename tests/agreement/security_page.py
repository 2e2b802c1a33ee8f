"""docs/explanation/security.md, as tests read it."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/explanation/security.md"
RIGHT = re.compile(r"^\| `(?P<resource>[a-z0-9./-]+)` \| (?P<verbs>[a-z, ]+) \|$", re.MULTILINE)


def documented_rights() -> dict[str, set[str]]:
    """Resource, as kubectl names it, -> verbs."""
    return {
        found["resource"]: set(found["verbs"].split(", "))
        for found in RIGHT.finditer(PAGE.read_text())
    }
