"""The goodput of a run: the share of time in steps that were kept, and where the rest went."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training import open_folder, small_config, train_here

from trainyard_trainer.run_folder.measurements.goodput import (
    AttemptTime,
    Goodput,
    GroupTime,
    RunningGoodput,
    goodput_of,
    measure,
)
from trainyard_trainer.run_folder.measurements.progress import LOOP_PHASES, Trained, read_lines
from trainyard_trainer.run_folder.run_record import iso

SCRATCH = dict.fromkeys(LOOP_PHASES, 0.0)


def trained(steps_s: float, **others: float) -> dict[str, float]:
    """`Trained.seconds` of a checkpoint."""
    return {"startup": 7.0, "compute": 0.75 * steps_s, "communication": 0.25 * steps_s} | others


def attempt(began: float, ended: float, number: int = 1, workers: int = 2) -> AttemptTime:
    return AttemptTime(number=number, began=began, ended=ended, workers=workers)


def group(
    began: float,
    loop_began: float | None,
    resumed: dict[str, float] = SCRATCH,
    *,
    reached: float = 0.0,
    attempt: int = 1,
    workers: int = 2,
    start: Mapping[str, float] = MappingProxyType({}),
) -> GroupTime:
    return GroupTime(
        attempt=attempt,
        workers=workers,
        began=began,
        loop_began=loop_began,
        resumed=resumed,
        reached_before_s=reached,
        start=start,
    )


# What each part is.


def test_an_undisturbed_run_has_a_start_its_loop_and_an_end() -> None:
    found = goodput_of(
        [attempt(0.0, 100.0)],
        [group(0.0, 10.0, start={"imports": 2.0, "lease": 0.5, "workers": 6.0, "first_step": 3.0})],
        trained(70.0, data=5.0, validation=4.0, checkpoint=1.0),
    )
    assert found.share == pytest.approx(0.7)
    assert (found.total_s, found.steps_s, found.data_s) == (200.0, 140.0, 10.0)
    assert (found.validation_s, found.checkpoint_s, found.starts_s) == (8.0, 2.0, 20.0)
    assert (found.again_s, found.unnoticed_s, found.ends_s) == (0.0, 0.0, 20.0)
    told = {"imports": 4.0, "lease": 1.0, "workers": 12.0, "other": 3.0}
    assert {name: seconds for name, seconds in found.starts.items() if seconds} == told


def test_steps_after_the_checkpoint_of_a_killed_group_were_trained_again() -> None:
    checkpoint = trained(30.0)
    found = goodput_of(
        [attempt(0.0, 100.0)],
        [group(0.0, 10.0), group(50.0, 55.0, checkpoint, reached=38.0)],
        trained(70.0),
        reached_s=70.0,
    )
    assert (found.steps_s, found.starts_s) == (140.0, 30.0)
    assert found.again_s == 2 * 8.0
    assert found.unnoticed_s == 2 * (50.0 - 10.0 - 38.0)
    assert found.ends_s == 2 * (100.0 - 55.0 - 40.0)


def test_a_run_that_goes_on_from_an_older_checkpoint_loses_what_groups_before_had_kept() -> None:
    found = goodput_of(
        [attempt(0.0, 40.0, 1), attempt(60.0, 100.0, 2), attempt(100.0, 200.0, 3)],
        [
            group(0.0, 10.0, attempt=1),
            group(0.0, 70.0, trained(20.0), reached=25.0, attempt=2),
            # The newest checkpoints are damaged: only that of 12 s is intact.
            group(0.0, 110.0, trained(12.0), reached=45.0, attempt=3),
        ],
        trained(82.0),
    )
    assert found.steps_s == 2 * 82.0
    assert found.again_s == 2 * (13.0 + 25.0)
    assert found.between_attempts_s == 20.0
    assert found.total_s == 2 * 180.0


def test_a_group_that_made_no_step_has_only_tried_to_start() -> None:
    groups = [group(0.0, 10.0), group(40.0, None, reached=30.0), group(60.0, 65.0, reached=30.0)]
    found = goodput_of([attempt(0.0, 100.0)], groups, trained(35.0))
    assert found.starts["unfinished"] == 2 * 20.0
    # The newest record is that of the first group. It is counted once.
    assert found.again_s == 2 * 30.0


def test_an_attempt_that_ended_before_its_workers_started_counts_those_that_it_asked_for() -> None:
    found = goodput_of([attempt(0.0, 30.0, workers=8)], [], {})
    assert (found.total_s, found.starts["unfinished"], found.share) == (240.0, 240.0, 0.0)


def test_each_worker_counts_while_it_was_there() -> None:
    groups = [
        group(0.0, 10.0, workers=4),
        group(50.0, 50.0, trained(40.0), reached=40.0, workers=1),
    ]
    found = goodput_of([attempt(0.0, 100.0)], groups, trained(90.0))
    assert (found.total_s, found.steps_s) == (4 * 50.0 + 50.0, 4 * 40.0 + 50.0)


def test_a_run_that_has_held_no_workers_has_no_share() -> None:
    assert Goodput().share == 0.0


# Whatever happens, the parts are the whole.

TIMES = st.floats(-50, 1000, allow_nan=False)
SPENT = st.floats(0, 300, allow_nan=False)


@st.composite
def points(draw: st.DrawFn) -> dict[str, float]:
    return {phase: draw(SPENT) for phase in (*LOOP_PHASES, "startup")}


@st.composite
def histories(
    draw: st.DrawFn,
) -> tuple[list[AttemptTime], list[GroupTime], dict[str, float], float]:
    """Attempts with groups, by clocks that need not agree, and checkpoints of any order."""
    attempts, groups, now = [], [], 0.0
    for number in range(1, draw(st.integers(1, 4)) + 1):
        began, length = now + draw(SPENT), draw(SPENT)
        now = began + length
        workers = draw(st.integers(1, 64))
        attempts.append(AttemptTime(number=number, began=began, ended=now, workers=workers))
        for _ in range(draw(st.integers(0, 4))):
            groups.append(
                GroupTime(
                    attempt=number,
                    workers=workers,
                    began=draw(TIMES),
                    loop_began=draw(st.none() | TIMES),
                    resumed=draw(points()),
                    reached_before_s=draw(SPENT),
                    start={name: draw(SPENT) for name in ("imports", "workers", "first_batch")},
                )
            )
    return attempts, groups, draw(points()), draw(SPENT)


@settings(deadline=None)
@given(histories())
def test_the_parts_add_up_to_the_seconds_of_all_workers_whatever_the_clocks_say(
    history: tuple[list[AttemptTime], list[GroupTime], dict[str, float], float],
) -> None:
    attempts, *_ = history
    found = goodput_of(*history)
    held_s = sum(each.workers * (each.ended - each.began) for each in attempts)
    assert found.total_s == pytest.approx(held_s, abs=1e-6)
    assert all(seconds >= 0 for seconds in (*found.parts.values(), *found.starts.values()))
    assert 0 <= found.share <= 1
    told = found.to_json()
    assert told["total_s"] == round(sum(told[part] for part in found.parts), 3)
    assert told["starts_s"] == round(sum(told["starts"].values()), 3)


# From the files of a run.


def test_a_run_that_has_not_begun_has_no_goodput(tmp_path: Path) -> None:
    folder = open_folder(small_config(tmp_path))
    assert measure(folder, Trained(), 0.0) is None
    assert RunningGoodput(folder, Trained(), 1)({}) is None


def test_the_parts_of_a_real_run_make_its_whole_time(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    outcome = train_here(config)
    folder = open_folder(config)
    (_, start) = read_lines(folder, folder.starts)
    began = start["began"]
    line = {"attempt": 1, "began": began, "imports_s": 2.0, "workers": 1, "reached_loop_s": 0.0}
    folder.append(folder.attempts, json.dumps(line) + "\n")
    record = {"attempt": 1, "began": iso(began), "ended": None, "counted_until": began}
    folder.write(folder.run, json.dumps({"record": [record]}))
    found = measure(folder, outcome.trained, began + 98.0)
    assert found is not None
    assert found.total_s == pytest.approx(100.0)
    assert found.starts["imports"] == 2.0
    assert found.steps_s == pytest.approx(
        outcome.trained.seconds["compute"] + outcome.trained.seconds["communication"]
    )
    assert found.again_s == pytest.approx(0.0, abs=0.5)
    assert found.ends_s > 50.0

    running = RunningGoodput(folder, outcome.trained, 1, now=lambda: began + 98.0)
    assert running(outcome.trained.seconds) == pytest.approx(found.share)


def test_a_running_group_adds_its_steps_and_its_time(tmp_path: Path) -> None:
    folder = open_folder(small_config(tmp_path))
    line = {"attempt": 1, "began": 10.0, "imports_s": 0.0, "workers": 2, "reached_loop_s": 0.0}
    folder.append(folder.attempts, json.dumps(line) + "\n")
    record = {"attempt": 1, "began": iso(10.0), "ended": None, "counted_until": 10.0}
    folder.write(folder.run, json.dumps({"record": [record]}))
    times = iter([20.0, 60.0])
    running = RunningGoodput(folder, Trained(seconds=trained(5.0)), 2, now=lambda: next(times))
    assert running(trained(5.0)) == 0.0
    assert running(trained(35.0)) == pytest.approx(30.0 / 50.0)


def test_a_run_that_an_older_image_began_has_no_goodput(tmp_path: Path) -> None:
    folder = open_folder(small_config(tmp_path))
    folder.append(folder.attempts, '{"attempt": 1, "began": 10.0, "imports_s": 1.0}\n')
    folder.write(folder.run, json.dumps({"record": []}))
    assert measure(folder, Trained(), 20.0) is None
