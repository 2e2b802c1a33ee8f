"""The catalogue as a page: docs/explain.md, which `make golden` writes and a test compares."""

from __future__ import annotations

from collections.abc import Iterator

from trainyard.diagnosis.catalogue import CATALOGUE, CHAPTERS

INTRODUCTION = f"""\
# What `trainyard explain` knows

`trainyard explain RUN` looks at a run's RayJob, RayCluster, pods, events, claims, quotas, queue, nodes and
operator, and at its driver's log, and names one cause and one remedy. It knows {len(CATALOGUE)} failures and
looks for them in this order: what stands first is the cause of what stands below. Words in capitals stand
for names of the run. This page is made of the catalogue itself
(`launcher/trainyard/diagnosis/`) by `make golden`.
"""


def catalogue_page() -> str:
    """The page in Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield INTRODUCTION
    for title, failures in CHAPTERS:
        yield f"## {title}\n"
        for known in failures:
            yield f"### {known.name}\n"
            yield f"{known.cause}\n"
            yield f"* Shows in: {known.seen}."
            yield f"* Remedy: {known.general_remedy}\n"
