"""What all benches share: alternating rounds, their median and spread, targets, Markdown and JSON.

A bench is a module with a function `measure(options) -> list[Section]` and, at its end, `main(measure)`.
Whatever is compared is measured in turn, A B A B ..., within one run: a machine whose speed drifts, as shared
ones do, then changes both sides alike, and the ratio of each round still means something.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "bench"
"""What benches leave behind; `make clean` removes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How thoroughly to measure."""

    quick: bool = False
    """Tiny numbers, which mean nothing, in seconds: shows that the bench still works."""
    rounds: int | None = None
    """Instead of the bench's own number."""
    more: argparse.Namespace = field(default_factory=argparse.Namespace)
    """What one bench alone can be told."""

    def choose(self, full: Any, quick: Any) -> Any:
        return quick if self.quick else full

    def rounds_or(self, full: int) -> int:
        return self.rounds or self.choose(full, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure: a value per round, and what it should be."""

    what: str
    unit: str
    values: tuple[float, ...]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def is_met(self) -> bool | None:
        """Whether the median keeps the target; None without one."""
        if self.at_least is not None:
            return self.median >= self.at_least
        return self.median <= self.at_most if self.at_most is not None else None

    @property
    def target(self) -> str:
        if self.at_least is not None:
            return f">= {shown(self.at_least)}"
        return f"<= {shown(self.at_most)}" if self.at_most is not None else ""

    def cells(self) -> list[str]:
        verdict = {None: "", True: "met", False: "**missed**"}[self.is_met]
        spread = f"{shown(min(self.values))} - {shown(max(self.values))}"
        return [
            self.what,
            f"{shown(self.median)} {self.unit}".strip(),
            spread if len(self.values) > 1 else "",
            self.target,
            verdict,
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "unit": self.unit,
            "median": self.median,
            "lowest": min(self.values),
            "highest": max(self.values),
            "values": list(self.values),
            "at_least": self.at_least,
            "at_most": self.at_most,
            "target": self.target or None,
            "met": self.is_met,
        }

    @classmethod
    def of_json(cls, known: Mapping[str, Any]) -> Row:
        return cls(
            what=known["what"],
            unit=known["unit"],
            values=tuple(known["values"]),
            at_least=known["at_least"],
            at_most=known["at_most"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A table of a bench."""

    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    """Sentences below it: with what it was measured, what is not in it."""

    def markdown(self) -> str:
        lines = [
            f"### {self.title}",
            "",
            "| figure | median | lowest - highest | target | |",
            "|---|---|---|---|---|",
            *(f"| {' | '.join(row.cells())} |" for row in self.rows),
        ]
        if not self.rows:
            lines = lines[:1]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes), ""])

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "rows": [row.to_json() for row in self.rows],
            "notes": list(self.notes),
        }

    @classmethod
    def of_json(cls, known: Mapping[str, Any]) -> Section:
        rows = tuple(map(Row.of_json, known["rows"]))
        return cls(title=known["title"], rows=rows, notes=tuple(known["notes"]))


def shown(value: float) -> str:
    """With three digits that count: 0.0123, 4.57, 1,235."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def alternate(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, tuple[float, ...]]:
    """What each way gave in each round; in a round each has its turn."""
    values: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            values[name].append(way())
    return {name: tuple(found) for name, found in values.items()}


def epochs_of(
    epoch: Callable[[int], Iterable[Any]], size: Callable[[Any], int]
) -> Callable[[], float]:
    """Return a way that reads the batches of the next epoch in each turn, and gives samples per second."""
    turns = iter(range(10**6))

    def turn() -> float:
        began = time.perf_counter()
        samples = sum(map(size, epoch(next(turns))))
        return samples / (time.perf_counter() - began)

    return turn


def compile_sources() -> None:
    """Compile the byte code of the launcher and the trainer, as their installation does.

    Commands do not do it themselves where PYTHONDONTWRITEBYTECODE is set.
    """
    for folder in ("launcher", "train_image"):
        compileall.compile_dir(ROOT / folder, quiet=1)


def ratios(ones: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    """Round by round."""
    return tuple(one / other for one, other in zip(ones, others, strict=True))


def machine() -> dict[str, Any]:
    """What a reader must know of the machine beside the figures."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def say(line: str) -> None:
    """How a measurement goes on; the tables alone go to stdout."""
    print(line, file=sys.stderr, flush=True)


def main(measure: Callable[[Options], list[Section]], **more: dict[str, Any]) -> None:
    """Measure as the command line says, print Markdown, and leave JSON for the whole report.

    `more` are options of this bench alone: a name, and what argparse wants to know of it.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="tiny numbers, in seconds")
    parser.add_argument("--rounds", type=int, help="instead of the bench's own number")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    for name, known in more.items():
        parser.add_argument(f"--{name}", **known)
    wanted = parser.parse_args()
    # Runs that were started are ended by whoever waits for them, as at Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    known = machine()
    sections = measure(Options(quick=wanted.quick, rounds=wanted.rounds, more=wanted))
    quick = ", quick: the figures mean nothing" if wanted.quick else ""
    print(
        f"Python {known['python']}, {known['cpus']} CPUs ({known['machine']}), "
        f"load {known['load']} at the start{quick}\n"
    )
    print("\n".join(section.markdown() for section in sections), flush=True)
    if wanted.json:
        wanted.json.parent.mkdir(parents=True, exist_ok=True)
        found = {"machine": known, "quick": wanted.quick}
        found |= {"sections": [section.to_json() for section in sections]}
        wanted.json.write_text(json.dumps(found, indent=2) + "\n")
