"""What is put down of workers that fail, or leave."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from training import open_folder, small_config

from trainyard_trainer.run_folder import failures
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import read_lines
from trainyard_trainer.run_folder.ownership.fence import Fence


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return open_folder(small_config(tmp_path))


def test_errors_are_put_down_once_for_each_group_with_rank_time_and_first_line(
    folder: RunFolder,
) -> None:
    before = time.time()
    Fence.claim(folder, 1)
    errors = {1: RuntimeError("the actor died\n  of this"), 0: ValueError()}
    said = failures.record(folder, 1, errors)
    assert said == [
        "worker 0 of group 1 failed: ValueError",
        "worker 1 of group 1 failed: the actor died",
    ]
    # They are looked at until all have left.
    assert failures.record(folder, 1, errors) == []
    Fence.claim(folder, 1)
    assert failures.record(folder, 1, {0: RuntimeError("again")}) == [
        "worker 0 of group 2 failed: again"
    ]
    found = read_lines(folder, folder.failures)
    assert [(each["attempt"], each["group"], each["rank"]) for each in found] == [
        (1, 1, 0),
        (1, 1, 1),
        (1, 2, 0),
    ]
    assert all(before - 0.001 <= each["time"] <= time.time() + 0.001 for each in found)


def test_ray_s_wrappers_and_colours_are_taken_off() -> None:
    from ray.exceptions import RayTaskError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    died = RuntimeError("\x1b[36mThe actor died\x1b[39m\nclass_name: Worker")
    assert failures.first_line(WorkerHealthCheckFailedError("a check failed", died)) == (
        "The actor died"
    )
    task = RayTaskError("join", "Traceback ...", ValueError("no answer"))
    assert failures.first_line(task) == "no answer"


def test_a_group_learns_when_the_one_before_had_failed_or_left(folder: RunFolder) -> None:
    assert failures.noticed_at(folder, 1, 1) is None
    Fence.claim(folder, 1)
    failures.note_leaving(folder, 1)
    (left,) = read_lines(folder, folder.failures)
    assert (left["rank"], left["error"]) == (None, None)
    assert failures.noticed_at(folder, 1, 1) == left["time"]
    assert failures.noticed_at(folder, 1, 2) is None
    assert failures.noticed_at(folder, 2, 1) is None
