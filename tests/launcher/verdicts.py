"""What a real API server says of mutated objects: asked on a cluster, stored in `verdicts.json`.

`tests/cluster/run .venv/bin/python -m tests.launcher.verdicts` asks the cluster in use, by dry runs that
create nothing, and rewrites the file.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.launcher.mutated_objects import mutated
from tests.launcher.rayjobs import Object, raycluster, rayjob
from trainyard.cluster.cluster import Cluster
from trainyard.errors import ClusterError

FILE = Path(__file__).parent / "verdicts.json"
STORED = 500
REMOVED = "<removed>"

Changes = list[tuple[list[str | int], Any]]
Verdict = tuple[str, Changes, bool]
"""The kind of an object, its changes, and whether the API server accepts it."""


def stored() -> Iterator[tuple[Object, bool]]:
    """The stored objects, and whether the API server accepted each."""
    for kind, changes, is_accepted in json.loads(FILE.read_text(encoding="utf-8")):
        yield with_changes(kind, changes), is_accepted


def collect(examples: int, number: int, is_accepted: Callable[[Object], bool]) -> list[Verdict]:
    """Ask about this many mutated objects; `number` is the seed."""
    verdicts: dict[str, Verdict] = {}

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(mutated())
    def ask(document: Object) -> None:
        changes = _changes(_base(document["kind"]), document, [])
        verdict = (document["kind"], changes, is_accepted(document))
        verdicts[json.dumps(verdict)] = verdict

    ask()
    return list(verdicts.values())


def api_server(cluster: Cluster) -> Callable[[Object], bool]:
    """Return a function that says whether the API server accepts an object, by a dry run."""

    def is_accepted(document: Object) -> bool:
        document = copy.deepcopy(document)
        if isinstance(document.get("metadata"), dict):
            document["metadata"]["namespace"] = cluster.namespace
        try:
            cluster.create(document, dry_run=True)
        except ClusterError:
            return False
        return True

    return is_accepted


def _base(kind: str) -> Object:
    return (rayjob if kind == "RayJob" else raycluster)({})


def _changes(before: Any, after: Any, path: list[str | int]) -> Changes:
    """The places at which two objects differ, with the new values."""
    if isinstance(before, dict) and isinstance(after, dict):
        found: Changes = [([*path, key], REMOVED) for key in before if key not in after]
        for key, value in after.items():
            if key in before:
                found += _changes(before[key], value, [*path, key])
            else:
                found.append(([*path, key], value))
        return found
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [one for index, pair in pairs for one in _changes(*pair, [*path, index])]
    is_equal = type(before) is type(after) and before == after
    return [] if is_equal else [(path, after)]


def with_changes(kind: str, changes: Changes) -> Object:
    """Return the valid object of a kind with these changes."""
    document = _base(kind)
    for path, value in changes:
        here: Any = document
        for step in path[:-1]:
            here = here[step]
        if value == REMOVED:
            del here[path[-1]]
        else:
            here[path[-1]] = value
    return document


if __name__ == "__main__":
    rows = collect(STORED, 0, api_server(Cluster("default")))
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
