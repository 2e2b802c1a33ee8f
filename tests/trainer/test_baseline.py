"""The same run without Ray: in one process, and in those that torchrun starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from attempts import PACKAGES, wait_for
from training import Group, ThreadWorker, metrics, open_folder, small_config

from trainyard_trainer import program
from trainyard_trainer.attempt import attempt, without_ray
from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
    SavedCheckpoint,
)
from trainyard_trainer.config.trainer_config import CONFIG_VARIABLE, TrainerConfig
from trainyard_trainer.engine.outcome import Outcome
from trainyard_trainer.errors import ConfigError, RunError, TrainerError
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder import stop_signals
from trainyard_trainer.run_folder.log import Output
from trainyard_trainer.run_folder.measurements.progress import Trained
from trainyard_trainer.run_folder.measurements.startup import Startup

ALONE = (sys.executable, "-m", "trainyard_trainer", "--without-ray")


def torchrun(processes: int) -> tuple[str, ...]:
    own = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    return (sys.executable, *own, "-m", "trainyard_trainer", "--without-ray")


def environment_of(config: TrainerConfig) -> dict[str, str]:
    return {CONFIG_VARIABLE: config.model_dump_json()}


@contextmanager
def started(command: tuple[str, ...], config: TrainerConfig) -> Iterator[subprocess.Popen[str]]:
    """A process of a user's; what is left of it at the end is killed."""
    process = subprocess.Popen(
        command,
        env={
            **os.environ,
            "PYTHONPATH": str(PACKAGES),
            "OMP_NUM_THREADS": "1",
            **environment_of(config),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def finish_here(config: TrainerConfig) -> int:
    """Run the rest of it in this process; returns the exit code."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        return program.main(["--without-ray"], environment_of(config))
    finally:
        signal.signal(signal.SIGTERM, before)


def newest(config: TrainerConfig) -> SavedCheckpoint:
    found = Checkpoints(open_folder(config)).newest()
    assert found is not None
    return found


def summary(config: TrainerConfig) -> dict[str, Any]:
    folder = open_folder(config)
    return json.loads(folder.read(folder.summary))


def is_training(config: TrainerConfig) -> bool:
    folder = open_folder(config)
    return bool(folder.exists(folder.starts))


# Runs that are stopped and go on.

SHORT_STEPS: dict[str, Any] = {"train__global_batch_size": 16, "train__epochs": 5}
"""89 steps in each epoch, so that one of them is under way when the notice is heard."""


def stop(command: tuple[str, ...], config: TrainerConfig) -> SavedCheckpoint:
    """Start it, tell it to go as soon as it trains, and return the checkpoint that it has left."""
    with started(command, config) as process:
        assert wait_for(lambda: is_training(config) or process.poll() is not None, 120)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "error: the run was stopped by SIGTERM; started again, it goes on from there" in output
    assert summary(config)["error"] == str(stop_signals.StoppedBySignal())
    left = newest(config)
    assert 0 < left.trained.steps_in_epoch < 89
    return left


def check_whole(config: TrainerConfig, left: SavedCheckpoint) -> None:
    """The run is complete, and has gone on at exactly that checkpoint."""
    found = summary(config)
    assert (found["outcome"], found["resumed_from"]) == ("succeeded", left.name)
    assert (found["epochs"], found["steps"], found["attempts"]) == (5, 5 * 89, 2)
    steps = [record["step"] for record in metrics(config)]
    assert steps == sorted(set(steps))
    ended = metrics(config, "epoch")
    assert [record["step"] for record in ended] == [89, 178, 267, 356, 445]


@pytest.mark.slow
def test_one_process_saves_in_mid_epoch_when_it_is_told_to_go_and_goes_on_there(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path, **SHORT_STEPS)
    left = stop(ALONE, config)
    assert finish_here(config) == 0
    check_whole(config, left)
    before = metrics(config)
    # Nothing is left to do.
    assert finish_here(config) == 0
    assert metrics(config) == before


@pytest.mark.ci
def test_processes_of_torchrun_save_in_mid_epoch_when_it_is_told_to_go(tmp_path: Path) -> None:
    left = stop(torchrun(2), small_config(tmp_path, scaling__num_workers=2, **SHORT_STEPS))
    # One process can go on where two have stopped.
    config = small_config(tmp_path, **SHORT_STEPS)
    assert finish_here(config) == 0
    check_whole(config, left)


@pytest.mark.slow
def test_processes_of_torchrun_have_those_that_decode_until_they_have_saved(tmp_path: Path) -> None:
    """torchrun tells all processes of a worker to go at once."""
    config = small_config(tmp_path, scaling__num_workers=2, data__decode_workers=1, **SHORT_STEPS)
    left = stop(torchrun(2), config)
    for attempts in (2, 3):
        # The third start finds nothing to do, and no rank waits for it.
        with started(torchrun(2), config) as process:
            output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        assert summary(config)["attempts"] == attempts
        if attempts == 2:
            check_whole(config, left)


# What cannot be.


@pytest.mark.parametrize(
    ("changes", "processes", "problem"),
    [
        (
            {"scaling__num_workers": 2},
            1,
            "the run has 2 workers, but 1 processes were started. Use torchrun --nproc-per-node 2, "
            "or resources of 1",
        ),
        ({"scaling__num_workers": 1}, 2, "the run has 1 workers, but 2 processes were started"),
        (
            {"data__loader": "ray"},
            1,
            "data.loader = ray needs Ray. Without it, set data.loader=torch",
        ),
    ],
)
def test_what_cannot_be_without_ray_ends_with_2_and_no_attempt(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    processes: int,
    problem: str,
) -> None:
    config = small_config(tmp_path, **changes)
    environment = {**environment_of(config), "RANK": "0", "WORLD_SIZE": str(processes)}
    assert program.main(["--without-ray"], environment) == 2
    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_on_gpus_is_refused_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"CUDA is missing.*resources\.workers"):
        without_ray.join(small_config(tmp_path, scaling__use_gpu=True), {})


@pytest.mark.parametrize("use_gpu", [True, False])
def test_what_a_gpu_s_worker_has_in_host_memory_is_exchanged_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_gpu: bool
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: use_gpu)
    monkeypatch.setattr("torch.cuda.set_device", lambda _: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", asked.append)
    config = small_config(tmp_path, scaling__num_workers=2, scaling__use_gpu=use_gpu)
    without_ray.join(config, {"RANK": "1", "WORLD_SIZE": "2"})
    assert asked == ["cpu:gloo,cuda:nccl" if use_gpu else "gloo"]


# Rank 0 and the others.

STARTUP = Startup(began=0.0)
DONE = Outcome(resumed_from=None, trained=Trained(epoch=2), startup=STARTUP)
STOPPED = Outcome(resumed_from=None, trained=Trained(), startup=STARTUP, is_stopped=True)


@dataclass
class Told:
    """Stands for a task."""

    attempt: int = 1


def pretend(
    patch: pytest.MonkeyPatch,
    work: Callable[[Told, Worker], Outcome],
    *,
    has_work: bool,
    error: Exception | None,
) -> None:
    """Attempts that find something to do or not, and may fail afterwards; ranks that do it by `work`."""

    def run(config: TrainerConfig, output: Output, fit: Any) -> None:
        if has_work:
            fit(Told(), open_folder(config), None)
        if error:
            raise error

    patch.setattr(attempt, "run", run)
    patch.setattr(attempt, "fetch_here", lambda task, folder: None)
    patch.setattr(without_ray, "work", work)
    # Only a main thread can handle signals.
    patch.setattr(signal, "signal", lambda number, handler: None)


@pytest.mark.parametrize(
    ("outcome", "error", "raised"),
    [
        (DONE, None, None),
        # Nothing was left to train: the others must not wait for it.
        (None, None, None),
        (None, ConfigError("of the data"), "of the data"),
        (DONE, OSError("of the report"), "of the report"),
        (STOPPED, None, str(stop_signals.StoppedBySignal())),
    ],
)
def test_all_ranks_leave_in_good_order_when_rank_0_has_no_more_work_for_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Outcome | None,
    error: Exception | None,
    raised: str | None,
) -> None:
    worked: list[int] = []

    def work(task: Told, worker: Worker) -> Outcome:
        assert task == Told()
        worked.append(worker.rank)
        assert outcome
        return outcome

    pretend(monkeypatch, work, has_work=outcome is not None, error=error)

    def rank(worker: ThreadWorker) -> str | None:
        try:
            if worker.rank == 0:
                without_ray.Leader(worker).run(small_config(tmp_path), Output())
            else:
                without_ray.follow(worker)
        except (TrainerError, OSError) as problem:
            return str(problem)
        return None

    assert Group(3).run(rank) == [raised, None, None]
    assert sorted(worked) == ([0, 1, 2] if outcome else [])


@dataclass(frozen=True, kw_only=True, slots=True)
class Teller(Worker):
    """Rank 0 of a group whose others only listen."""

    told: list[Any] = field(default_factory=list)

    def from_rank_zero(self, value: Any) -> Any:
        self.told.append(value)
        return value


def test_rank_0_says_nothing_more_when_it_was_torn_from_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are in the midst of an exchange, and would take the word for a part of it."""

    def work(task: Told, worker: Worker) -> Outcome:
        raise RunError("of a step")

    pretend(monkeypatch, work, has_work=True, error=None)
    worker = Teller(world_size=2, device=torch.device("cpu"))
    with pytest.raises(RunError, match="of a step"):
        without_ray.Leader(worker).run(small_config(tmp_path), Output())
    assert worker.told == [Told()]


ONLY_FOR_FINE_TUNING = {"transformers", "peft", "tokenizers", "accelerate", "safetensors"}


@pytest.mark.ci
def test_a_run_of_another_recipe_imports_nothing_of_transformers(tmp_path: Path) -> None:
    command = (sys.executable, "-X", "importtime", *ALONE[1:])
    with started(command, small_config(tmp_path)) as process:
        output, _ = process.communicate()
    assert process.returncode == 0, output
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in output.splitlines()}
    assert "torch" in imported
    assert not imported & ONLY_FOR_FINE_TUNING
