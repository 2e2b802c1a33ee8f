"""The catalogue of known failures as a page: docs/reference/failures.md; `make golden` writes it."""

from __future__ import annotations

from collections.abc import Iterator

from trainyard.diagnosis.catalogue import CATALOGUE, CHAPTERS

INTRODUCTION = f"""\
# Known failures

```sh
trainyard explain RUN
```

`trainyard explain` looks at a run's RayJob, RayCluster, pods, events, claims, quotas, queue, nodes and
operator, and at its driver's log. It names one cause and one remedy. It recognises the {len(CATALOGUE)}
failures below, and looks for them in this order: a failure further up is the cause of those further down.
Words in capitals stand for names of the run. `make golden` generates this page from the catalogue in
`launcher/trainyard/diagnosis`.
"""


def catalogue_page() -> str:
    """Return the page of known failures in Markdown."""
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
