"""The type of a known failure, and of its match in a snapshot."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from string import Formatter

from trainyard.diagnosis.snapshot import Snapshot

SHOWN_LIMIT = 700
"""Maximum characters of a line of evidence; the scheduler lists every node that it has refused."""

COMMAND = re.compile(r"`(kubectl|trainyard) [^`]+")
"""A command in a remedy, without its last backtick."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """An observation: its source, such as an event or a log, and its text."""

    source: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """A known failure that was found in a snapshot."""

    cause: str
    """The cause in one sentence, with the names and numbers of this run."""
    evidence: tuple[Evidence, ...]
    values: Mapping[str, str] = field(default_factory=dict)
    """The values of the remedy's placeholders."""


Detect = Callable[[Snapshot], Match | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A known failure: one entry of the catalogue."""

    name: str
    """The identifier, which does not change: scripts and links use it."""
    cause: str
    """The cause in general, as one sentence."""
    seen: str
    """Where the failure can be observed."""
    remedy: str
    """The remedy, with placeholders in braces; run, namespace and submission are always known."""
    detect: Detect

    def remedy_for(self, snapshot: Snapshot, match: Match) -> str:
        known = {
            "run": snapshot.run,
            "namespace": snapshot.namespace,
            "submission": snapshot.submission,
        }
        remedy = self.remedy.format(**known | dict(match.values))
        if snapshot.context is None:
            return remedy
        # Commands to copy must reach the same cluster.
        chosen = f" --context {shlex.quote(snapshot.context)}"
        return COMMAND.sub(lambda found: found[0] + chosen, remedy)

    @property
    def placeholders(self) -> set[str]:
        return {field for _, field, _, _ in Formatter().parse(self.remedy) if field}

    @property
    def general_remedy(self) -> str:
        """The remedy with its placeholders in capitals, for the documentation."""
        names = {name: name.upper() for name in self.placeholders}
        return self.remedy.format(**names)


def failure(name: str, *, seen: str, remedy: str) -> Callable[[Detect], Failure]:
    """Return a decorator that makes a known failure from a function, with its docstring as the cause."""

    def make(detect: Detect) -> Failure:
        cause = (detect.__doc__ or "").strip().splitlines()[0]
        return Failure(name=name, cause=cause, seen=seen, remedy=remedy, detect=detect)

    return make


def evidence(source: str, text: str) -> Evidence:
    """Return evidence with its text on one line, cut to `SHOWN_LIMIT` characters."""
    line = " ".join(text.split())
    return Evidence(source, line if len(line) <= SHOWN_LIMIT else f"{line[:SHOWN_LIMIT]} ...")


def last_match(lines: Iterable[str], pattern: str) -> tuple[str, re.Match[str]] | None:
    """Return the last line that contains the pattern, with the match; None if there is none."""
    found = None
    for line in lines:
        if match := re.search(pattern, line):
            found = (line, match)
    return found


def any_of(*texts: str) -> str:
    """Return a pattern that matches any of these patterns, ignoring case."""
    return f"(?i:{'|'.join(texts)})"
