"""A known failure, and what is found of it in a snapshot."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from string import Formatter

from trainyard.diagnosis.snapshot import Snapshot

SHOWN_LIMIT = 700
"""Characters of a line of evidence; the scheduler lists every node that it has refused."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Where something was seen, and what exactly."""

    source: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """That a failure is there."""

    cause: str
    """In one sentence, with the names and numbers of this run."""
    evidence: tuple[Evidence, ...]
    values: Mapping[str, str] = field(default_factory=dict)
    """What the remedy's placeholders stand for."""


Detect = Callable[[Snapshot], Match | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One entry of the catalogue."""

    name: str
    """Stays the same, for scripts and links."""
    cause: str
    """In general."""
    seen: str
    """Where it shows."""
    remedy: str
    """With placeholders in braces; run, namespace and submission are always known."""
    detect: Detect

    def remedy_for(self, snapshot: Snapshot, match: Match) -> str:
        known = {
            "run": snapshot.run,
            "namespace": snapshot.namespace,
            "submission": snapshot.submission,
        }
        return self.remedy.format(**known | dict(match.values))

    @property
    def placeholders(self) -> set[str]:
        return {field for _, field, _, _ in Formatter().parse(self.remedy) if field}

    @property
    def general_remedy(self) -> str:
        """The remedy with its placeholders in capitals, for a page."""
        names = {name: name.upper() for name in self.placeholders}
        return self.remedy.format(**names)


def failure(name: str, *, seen: str, remedy: str) -> Callable[[Detect], Failure]:
    """Make a known failure of a function; the first line of its docstring is the cause."""

    def make(detect: Detect) -> Failure:
        cause = (detect.__doc__ or "").strip().splitlines()[0]
        return Failure(name=name, cause=cause, seen=seen, remedy=remedy, detect=detect)

    return make


def evidence(source: str, text: str) -> Evidence:
    """In one line, and not longer than a person reads."""
    line = " ".join(text.split())
    return Evidence(source, line if len(line) <= SHOWN_LIMIT else f"{line[:SHOWN_LIMIT]} ...")


def last_match(lines: Iterable[str], pattern: str) -> tuple[str, re.Match[str]] | None:
    """The last line in which the pattern is found, with the match."""
    found = None
    for line in lines:
        if match := re.search(pattern, line):
            found = (line, match)
    return found


def any_of(*texts: str) -> str:
    """A pattern that finds any of these patterns, in capitals or not."""
    return f"(?i:{'|'.join(texts)})"
