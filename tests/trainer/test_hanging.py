"""A worker that hangs is named with the place where it hangs, and its process is ended."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from attempts import Attempts, read_json, read_records, wait_for
from own_recipes import EXAMPLES, own_config, packed
from training import final_weights, same

from trainyard_trainer.on_ray.controller.hanging import Doing, hangs
from trainyard_trainer.run_files.driver_output import WORKER_HANGS

LIMIT_S = 10.0


@pytest.mark.parametrize(
    ("phases", "found"),
    [
        pytest.param(["data", "communication"], [0], id="one that loads a batch"),
        pytest.param(["communication", "compute"], [1], id="one that computes"),
        pytest.param(["data", "communication", "data"], [0, 2], id="two of three"),
        pytest.param(["data", "data"], [], id="none waits: storage that fails, or a slow start"),
        pytest.param(["communication", "communication"], [], id="all wait"),
        pytest.param(["checkpoint", "communication"], [], id="one that saves"),
        pytest.param(["communication", "validation"], [], id="one that validates"),
        pytest.param(["startup", "communication"], [], id="one that is new"),
    ],
)
def test_a_worker_hangs_that_moves_on_by_itself_while_others_wait(
    phases: list[str], found: list[int]
) -> None:
    doing = {rank: Doing(phase=phase, seconds=LIMIT_S) for rank, phase in enumerate(phases)}
    assert list(hangs(doing, dict.fromkeys(doing, 0.0), LIMIT_S)) == found


@pytest.mark.parametrize(("busy_s", "waiting_s"), [(9.9, 30.0), (30.0, 9.9)])
def test_neither_a_long_step_nor_a_short_wait_is_a_hang(busy_s: float, waiting_s: float) -> None:
    doing = {
        0: Doing(phase="compute", seconds=busy_s),
        1: Doing(phase="communication", seconds=waiting_s),
    }
    assert not hangs(doing, {0: 0.0, 1: 0.0}, LIMIT_S)


def test_a_worker_hangs_that_does_not_answer_whatever_it_was_doing() -> None:
    found = hangs({0: Doing(phase="startup", seconds=1.0)}, {0: LIMIT_S, 1: 9.9}, LIMIT_S)
    assert {rank: hang.words for rank, hang in found.items()} == {0: "it has not answered for 10 s"}


STUCK = """
import time
from pathlib import Path
import torch
from torch import distributed
from regression import Patients, Regression

FLAG = Path({flag!r})
calls = 0


def be_stuck(call):
    \"\"\"Hang in worker 1 at a call, once in a run.\"\"\"
    global calls
    calls += 1
    if calls >= call and distributed.is_initialized() and distributed.get_rank() == 1:
        try:
            FLAG.touch(exist_ok=False)
        except FileExistsError:
            return
        time.sleep(3600)


class StuckPatients(Patients):
    def __getitem__(self, index):
        be_stuck(500)
        return super().__getitem__(index)


class StuckLoss(Regression):
    def loss(self, model, batch):
        be_stuck(60)
        return super().loss(model, batch)
"""

STUCK_IN: dict[str, dict[str, Any]] = {
    "loading a batch": {"dataset": "stuck:StuckPatients"},
    "computing": {"recipe": "stuck:StuckLoss"},
}


@pytest.mark.parametrize(
    ("doing", "replaces"),
    [
        pytest.param("loading a batch", True, marks=pytest.mark.ci),
        pytest.param("loading a batch", False, marks=pytest.mark.slow),
        pytest.param("computing", True, marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_hangs_in_the_code_of_the_user_is_ended_and_the_run_goes_on(
    attempts: Attempts, tmp_path: Path, doing: str, replaces: bool
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "stuck.py").write_text(STUCK.format(flag=str(tmp_path / "flag")))
    (code / "regression.py").write_text((EXAMPLES / "regression.py").read_text())
    sha256, environment = packed(code)
    config, undisturbed = (
        own_config(folder, workers=2, epochs=10, **STUCK_IN[doing]).model_copy(
            update={"code_sha256": sha256}
        )
        for folder in (tmp_path, tmp_path / "undisturbed")
    )
    faults = {"hang_timeout_s": LIMIT_S, "replace_workers": replaces}
    config = config.model_copy(update={"faults": config.faults.model_copy(update=faults)})
    output = attempts.finish(config, environment=environment)
    (line,) = filter(None, map(WORKER_HANGS.search, output.splitlines()))
    assert line["rank"] == "1"
    assert line["what"].startswith(f"it has been {doing} for 1")
    assert "in be_stuck" in output
    assert "time.sleep(3600)" in output
    failed = {each["rank"]: each["error"] for each in read_records(config, "failures.jsonl")}
    assert failed[1] == f"{line['what']}, so its process was ended"
    assert (tmp_path / "own/replacements.jsonl").exists() == replaces
    groups = {each["group"] for each in read_records(config, "starts.jsonl")}
    assert len(groups) == (1 if replaces else 2)
    attempts.finish(undisturbed, environment=environment)  # the flag is there
    assert same(final_weights(config), final_weights(undisturbed))


@pytest.mark.slow
def test_a_worker_that_is_stopped_is_replaced(attempts: Attempts, tmp_path: Path) -> None:
    sha256, environment = packed(EXAMPLES)
    config = own_config(tmp_path, workers=2, epochs=400).model_copy(update={"code_sha256": sha256})
    faults = {"hang_timeout_s": LIMIT_S, "replace_workers": True}
    config = config.model_copy(update={"faults": config.faults.model_copy(update=faults)})
    driver = attempts.start(config, environment)
    assert wait_for(lambda: attempts.read(config, "metrics.jsonl"), 120)
    (_, last) = read_json(config, "workers.json")["workers"]
    os.kill(last["process"], signal.SIGSTOP)
    output, _ = driver.communicate()
    assert driver.returncode == 0, output
    (failed,) = read_records(config, "failures.jsonl")
    assert failed["error"].startswith("it has not answered for 1")
    assert read_json(config, "replacements.jsonl")["ranks"] == [1]
    assert not Path(f"/proc/{last['process']}").exists()
