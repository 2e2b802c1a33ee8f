"""The record and the goodput of a run as text for people, the same in `status`, `compare` and the report.

`run_folder.run_record` describes the record, and `run_folder.measurements.goodput` the goodput.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Object = Mapping[str, Any]

FIELD_NAMES: Mapping[str, str] = {
    "attempt": "attempt",
    "began": "began (UTC)",
    "ended": "ended (UTC)",
    "nodes": "nodes",
    "gpus": "GPUs",
    "gpu_hours": "GPU-hours",
    "cpu_hours": "CPU-hours",
    "image": "image",
    "image_digests": "image digest",
    "git": "git revision",
    "code_sha256": "code (SHA-256)",
    "gpu_driver": "GPU driver",
}
"""The name and the unit with which each field of the record is shown, wherever it is shown."""

COLUMNS = (
    *("attempt", "began", "ended", "nodes", "gpus", "gpu_hours", "cpu_hours"),
    *("image", "git", "code_sha256"),
)
HEADINGS = tuple(FIELD_NAMES[field] for field in COLUMNS)
"""The columns of the table of attempts."""

NODE_HEADINGS = ("attempt", "node", "Ray node", "GPU", "GPU id", FIELD_NAMES["gpu_driver"])
"""The columns of the table of nodes and GPUs."""

GOODPUT_PARTS: Mapping[str, str] = {
    "steps_s": "steps that were kept",
    "data_s": "waiting for data",
    "validation_s": "validation",
    "checkpoint_s": "waiting for checkpoints",
    "starts_s": "starts",
    "again_s": "steps trained again",
    "unnoticed_s": "faults until they were noticed",
    "ends_s": "ends of attempts",
}
"""The words for each part of the workers' time."""

GOODPUT_HEADINGS = ("workers' time", "seconds", "share")
"""The columns of the table of the goodput."""

NAMED_NODES = 3
"""The number of nodes that the table of attempts names; of further ones it gives the number."""

UNKNOWN = "-"

ID_DIGITS = 12
"""The first digits of a hash that are shown."""


def attempt_row(attempt: Object) -> tuple[str, ...]:
    """Return the row of an attempt in the table of attempts."""
    return (
        str(attempt["attempt"]),
        time_text(attempt["began"]),
        time_text(attempt["ended"]),
        nodes_text([node["name"] for node in attempt["nodes"]]),
        gpus_text([attempt]),
        f"{attempt['gpu_hours']:.4g}",
        f"{attempt['cpu_hours']:.4g}",
        image_text(attempt),
        git_text(attempt["git"]),
        (attempt["code_sha256"] or UNKNOWN)[:ID_DIGITS],
    )


def goodput_rows(goodput: Object) -> list[tuple[str, ...]]:
    """Return a row for each part of the workers' time that is not 0, with the phases of the starts."""
    rows = []
    for part, words in GOODPUT_PARTS.items():
        rows.append((words, goodput[part]))
        if part == "starts_s":
            rows += [(f"- {phase}", seconds) for phase, seconds in goodput["starts"].items()]
    whole = goodput["total_s"]
    return [
        (words, f"{seconds:.1f}", f"{seconds / whole:.1%}")
        for words, seconds in (*rows, ("all", whole))
        if seconds
    ]


def node_rows(record: Iterable[Object]) -> list[tuple[str, ...]]:
    """Return a row for each GPU of each node of each attempt; one for a node without GPUs."""
    nothing = {"model": UNKNOWN, "id": None}
    return [
        (
            str(attempt["attempt"]),
            node["name"],
            (node["id"] or UNKNOWN)[:ID_DIGITS],
            gpu["model"],
            gpu["id"] or UNKNOWN,
            node["gpu_driver"] or UNKNOWN,
        )
        for attempt in record
        for node in attempt["nodes"]
        for gpu in node["gpus"] or [nothing]
    ]


def time_text(time: str | None) -> str:
    """Return a time of the record in UTC, without the name of the time zone.

    >>> time_text("2026-01-31T08:15:00+00:00")
    '2026-01-31 08:15:00'
    """
    return UNKNOWN if time is None else time.partition("+")[0].replace("T", " ")


def nodes_text(names: Sequence[str]) -> str:
    """Return the names of the first nodes, and how many there are beside them.

    >>> nodes_text(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = len(names) - NAMED_NODES
    named = ", ".join(names[:NAMED_NODES]) or UNKNOWN
    return f"{named} and {more} more" if more > 0 else named


def gpus_text(record: Iterable[Object]) -> str:
    """Return how many GPUs of which model the attempts have used, such as `16 x NVIDIA H100`."""
    gpus = {
        (node["name"], node["id"], place, gpu["model"])
        for attempt in record
        for node in attempt["nodes"]
        for place, gpu in enumerate(node["gpus"])
    }
    models = Counter(model for *_, model in sorted(gpus, key=str))
    return ", ".join(f"{count} x {model}" for model, count in models.items()) or UNKNOWN


def image_text(attempt: Object) -> str:
    """Return the image of an attempt with the beginning of its digests."""
    name, _, _ = (attempt["image"] or UNKNOWN).partition("@")
    digests = [digest.removeprefix("sha256:")[:ID_DIGITS] for digest in attempt["image_digests"]]
    return f"{name} ({', '.join(digests)})" if digests else name


def git_text(git: Object | None) -> str:
    """Return the beginning of a git revision, and whether files differed from it."""
    if git is None:
        return UNKNOWN
    return git["revision"][:ID_DIGITS] + (", dirty" if git["is_dirty"] else "")
