"""The benches themselves: their arithmetic, and that each still runs to its end."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import __main__ as bench
from tests.bench import ways
from tests.bench.memory import growth
from tests.bench.processes import descendants, look_at, started_at
from tests.bench.rounds import ROOT, Row, Section, alternate, ratios, shown
from tests.bench.runs import steady

SHORT = {"launcher", "logs", "step", "streaming", "tables"}
"""The benches whose quick mode takes several seconds; the others start whole runs, and take up to minutes."""


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([name], id=name, marks=pytest.mark.ci if name in SHORT else pytest.mark.slow)
        for name in bench.BENCHES
    ]
    + [
        pytest.param(["gpu", "--device=cpu"], id="gpu on the CPU", marks=pytest.mark.ci),
        pytest.param(["ways", "--only=one process"], id="a way to train", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(900)
def test_each_bench_runs_to_its_end(arguments: list[str], tmp_path: Path) -> None:
    name, *more = arguments
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", f"tests.bench.{name}", "--quick", f"--json={file}", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    sections = json.loads(file.read_text())["sections"]
    assert all(f"### {section['title']}" in done.stdout for section in sections)
    rows = [row for section in sections for row in section["rows"]]
    assert rows or "no test cluster" in done.stdout
    assert all(math.isfinite(row["median"]) for row in rows)


def test_an_unknown_bench_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "speed"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "there is no bench speed: launcher," in done.stderr


# Rounds.


def test_ways_take_turns() -> None:
    order: list[str] = []

    def way(name: str) -> float:
        order.append(name)
        return len(order)

    found = alternate({"a": lambda: way("a"), "b": lambda: way("b")}, 2)
    assert order == ["a", "b", "a", "b"]
    assert found == {"a": (1, 3), "b": (2, 4)}
    assert ratios(found["b"], found["a"]) == (2, 4 / 3)


@pytest.mark.parametrize(
    ("limits", "cells"),
    [
        ({"at_least": 2.0}, ["speed", "2 x", "1 - 9", ">= 2", "met"]),
        ({"at_least": 2.1}, ["speed", "2 x", "1 - 9", ">= 2.1", "**missed**"]),
        ({"at_most": 1.9}, ["speed", "2 x", "1 - 9", "<= 1.9", "**missed**"]),
        ({}, ["speed", "2 x", "1 - 9", "", ""]),
    ],
)
def test_a_row_judges_the_median(limits: dict[str, float], cells: list[str]) -> None:
    row = Row(what="speed", unit="x", values=(9.0, 1.0, 2.0), **limits)
    assert row.cells() == cells
    assert f"| {' | '.join(cells)} |" in Section(title="t", rows=(row,)).markdown()


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.012345, "0.0123"), (4.567, "4.57"), (1234.5, "1,234"), (99.96, "100"), (0.0, "0")],
)
def test_figures_have_the_digits_that_count(value: float, text: str) -> None:
    assert shown(value) == text


# The page of all ways to train.


@pytest.mark.parametrize(
    ("rounds", "gpus", "said", "is_cpu"),
    [
        (1, 0, "One round of 8 epochs, 2 CPU workers, 16 CPUs. With CUDA", True),
        (3, 2, "Medians of 3 rounds of 8 epochs, 2 GPUs, 16 CPUs.\n", False),
    ],
)
def test_a_page_says_of_what_its_figures_are(
    rounds: int, gpus: int, said: str, is_cpu: bool, tmp_path: Path
) -> None:
    found = [
        ways.Found(start_s=each, samples_per_s=1, peak_bytes=None, again_s=1, again_epochs=0)
        for each in (7.0, 9.0, 8.0)[:rounds]
    ]
    results = ways.Results(epochs=8, gpus=gpus, cpus=16, ways={"FSDP2": found})
    results.save(tmp_path / "ways.json")
    page = ways.page(ways.Results.load(tmp_path / "ways.json"))
    assert said in page
    assert (ways.ON_CPU in page) == is_cpu
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(ways.WAYS)
    measured = [line for line in rows if " s | 1 | - | 1 s | 0 |" in line]
    assert [line.split(" | ")[3] for line in measured] == [{1: "7 s", 3: "8 s"}[rounds]]


# What runs leave.


def record(kind: str, step: int, samples_per_s: float) -> dict[str, object]:
    return {"kind": kind, "step": step, "samples_per_s": samples_per_s}


@pytest.mark.parametrize(
    ("metrics", "skip_s", "images", "seconds"),
    [
        # 10 steps of 8 images in 1 s each; the rest of the epoch, 5 steps, is in no interval.
        ([("interval", 10, 80.0), ("interval", 20, 80.0), ("epoch", 25, 80.0)], 0.0, 160, 2.0),
        ([("interval", 10, 80.0), ("interval", 20, 80.0), ("epoch", 25, 80.0)], 1.0, 80, 1.0),
        ([("interval", 10, 80.0), ("epoch", 15, 80.0), ("interval", 20, 80.0)], 0.0, 120, 1.5),
        # Epochs too short for an interval.
        ([("epoch", 5, 80.0), ("epoch", 10, 80.0)], 0.0, 80, 1.0),
        ([], 0.0, 0, 0.0),
    ],
)
def test_speed_is_counted_once_a_run_is_warm(
    metrics: list[tuple[str, int, float]], skip_s: float, images: int, seconds: float
) -> None:
    found = steady([record(*each) for each in metrics], batch_size=8, skip_s=skip_s)
    assert (found.images, found.seconds) == (images, pytest.approx(seconds))


def test_growth_is_what_came_after_the_second_quarter() -> None:
    assert growth([1, 5, 7, 7, 8, 8, 7, 14]) == 2
    assert growth([9, 5, 7, 7, 7, 7, 7, 7]) == 1
    assert growth([7]) == 1


def test_processes_are_found_with_their_memory_and_age() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = {process.pid: process for process in descendants(os.getpid())}
        assert found[child.pid].command.endswith("-c input()")
        assert found[child.pid].own_bytes > 0
        assert started_at(os.getpid()) < started_at(child.pid)
        child.communicate(b"\n")
    assert look_at(child.pid) is None
