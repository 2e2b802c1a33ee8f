"""Goodput of two runs on this machine, one of whose two workers is killed again and again.

In the first run all workers start again, in the second one the killed worker is replaced. Each is stopped
after `--minutes`, and tells where the time of its workers went. `--each` is the time in seconds between two
kills, each with SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.bench import data, runs
from tests.bench.rounds import Options, Row, Section, main, say
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.run_files.record_text import GOODPUT_PARTS

LEAST = 0.95
"""The goal for a run of 10 minutes whose worker is killed each minute."""

MINUTES = 3.0

EACH_S = 60.0


class Strikes:
    """Kills the worker of rank 1 again and again, once a run trains, and tells when it is enough."""

    def __init__(self, folder: Path, *, seconds: float, each_s: float) -> None:
        self.killed: list[int] = []
        """The ids of the processes that were killed."""
        self._folder = folder
        self._seconds = seconds
        self._each_s = each_s
        self._began: float | None = None

    def look(self, pid: int, metrics: list[dict[str, Any]]) -> None:
        """Kill the worker if it is time, and if there is a new one."""
        if not metrics:
            return
        now = time.monotonic()
        if self._began is None:
            self._began = now
        if now - self._began < self._each_s * (len(self.killed) + 1) or self.is_enough(metrics):
            return
        workers = json.loads((self._folder / "workers.json").read_text())["workers"]
        (process,) = (worker["process"] for worker in workers if worker["rank"] == 1)
        if process not in self.killed:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            self.killed.append(process)
            say(f"  killed worker 1 at step {metrics[-1]['step']}")

    def is_enough(self, metrics: list[dict[str, Any]]) -> bool:
        """Whether the run has trained for so long as was asked."""
        return self._began is not None and time.monotonic() - self._began >= self._seconds


def struck(config: TrainerConfig, seconds: float, each_s: float) -> tuple[dict[str, Any], int]:
    """Train with strikes; return the goodput, and how often a worker was killed."""
    folder = Path(config.storage.path) / config.name
    strikes = Strikes(folder, seconds=seconds, each_s=each_s)
    runs.run(config, is_enough=strikes.is_enough, look=strikes.look)
    goodput = json.loads((folder / "summary.json").read_text())["goodput"]
    say(f"  goodput {goodput['share']:.1%}, {len(strikes.killed)} strikes")
    return goodput, len(strikes.killed)


def measure(options: Options) -> list[Section]:
    minutes = options.choose(options.more.minutes, 0.4)
    each_s = options.choose(options.more.each, 10.0)
    config = runs.config(
        "goodput",
        data.grey_images(options.choose(4000, 400)),
        train__epochs=100_000,
        checkpoint__every_s=options.choose(10.0, 2.0),
        checkpoint__every_epochs=100_000,
        faults__worker_failures=1000,
    )
    notes = (
        f"2 CPU workers, ResNet-18, images of 28x28 that are prepared, for {minutes:g} minutes from the "
        f"first line of metrics on; worker 1 is killed with SIGKILL each {each_s:g} s. A checkpoint each "
        f"{config.checkpoint.every_s:g} s. After each epoch of 3,200 images, 800 are for validation.",
    )
    replaces = config.faults.model_copy(update={"replace_workers": True})
    return [
        Section(
            title=f"Goodput of a run that is struck: {what}",
            rows=rows_of([struck(each, 60 * minutes, each_s) for _ in range(options.rounds_or(1))]),
            notes=notes,
        )
        for what, each in (
            ("all workers start again", config),
            ("the killed worker is replaced", config.model_copy(update={"faults": replaces})),
        )
    ]


def without_validation(goodput: dict[str, Any], strikes: int) -> float:
    """The share of steps that were kept in the time that remains without validation."""
    share: float = goodput["steps_s"] / (goodput["total_s"] - goodput["validation_s"])
    return share


def rows_of(found: list[tuple[dict[str, Any], int]]) -> tuple[Row, ...]:
    """The rows for the goodput and the number of strikes of each round."""

    def row(what: str, unit: str, value: Callable[[dict[str, Any], int], float]) -> Row:
        return Row(what=what, unit=unit, values=tuple(value(*each) for each in found))

    return (
        Row(
            what="goodput",
            unit="",
            values=tuple(goodput["share"] for goodput, _ in found),
            at_least=LEAST,
        ),
        row("the same, of the time without validation", "", without_validation),
        row("strikes", "", lambda goodput, strikes: strikes),
        row("time of both workers together", "s", lambda goodput, strikes: goodput["total_s"]),
        *(
            row(f"- {words}", "s", lambda goodput, strikes, part=part: goodput[part])
            for part, words in GOODPUT_PARTS.items()
        ),
    )


if __name__ == "__main__":
    main(
        measure,
        minutes={"type": float, "default": MINUTES, "help": "how long the run trains"},
        each={"type": float, "default": EACH_S, "help": "seconds between two strikes"},
    )
