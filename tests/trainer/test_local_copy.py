"""One copy of the data per machine, shared by all who train on it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from torch import multiprocessing
from training import small_config, task_of

from trainyard_trainer.data.loading import local_copy
from trainyard_trainer.data.loading.local_copy import LocalCopy
from trainyard_trainer.data.prepared import Prepared

WORKERS = 6
ROUNDS = 5


def hold_copies(prepared: Prepared, scratches: list[str], all_hold: Any) -> None:
    """Take the copy at the same time as the others, and keep it until each of them has it."""
    for scratch in scratches:
        all_hold.wait(60)
        tempfile.tempdir = scratch
        rows = LocalCopy(prepared, prepared.train)
        all_hold.wait(60)
        assert len(rows) == prepared.num_train


def test_workers_that_want_the_same_copy_at_the_same_time_all_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = task_of(small_config(tmp_path)).data
    scratches = [str(tmp_path / str(number)) for number in range(ROUNDS)]
    for scratch in scratches:
        Path(scratch).mkdir()
    # Forked, so that they are at the same place at the same time.
    context = multiprocessing.get_context("fork")
    all_hold = context.Barrier(WORKERS)
    processes = [
        context.Process(target=hold_copies, args=(prepared, scratches, all_hold))
        for _ in range(WORKERS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * WORKERS
    # The last one to leave has removed it.
    for scratch in scratches[:-1]:
        assert list(Path(scratch).glob("*/*")) == []


@pytest.mark.timeout(20)
def test_who_looked_before_the_copy_was_made_does_not_wait_for_those_who_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = task_of(small_config(tmp_path)).data
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    holder = LocalCopy(prepared, prepared.train)
    answers = iter([False])
    look = local_copy.is_complete
    monkeypatch.setattr(local_copy, "is_complete", lambda folder: next(answers, look(folder)))
    assert len(LocalCopy(prepared, prepared.train)) == len(holder)
