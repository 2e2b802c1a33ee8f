"""What the driver can tell without Ray: where a run fits, what it says, how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train
from ray import cloudpickle
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train.v2.api import data_parallel_trainer
from training import open_folder, small_config, task_of

from trainyard_trainer import program
from trainyard_trainer.config.scaling import WORKER_RESOURCE, Scaling
from trainyard_trainer.config.trainer_config import CONFIG_VARIABLE
from trainyard_trainer.engine.outcome import Outcome
from trainyard_trainer.engine.task import TrainingTask
from trainyard_trainer.errors import RunError
from trainyard_trainer.on_ray import driver, worker
from trainyard_trainer.on_ray.controller.process_group import LeanTrainer
from trainyard_trainer.on_ray.driver import run_in_thread
from trainyard_trainer.on_ray.ray_cluster import missing_capacity
from trainyard_trainer.run_files.local_ray import LOCAL_RAY_VARIABLE
from trainyard_trainer.run_folder.log import Output
from trainyard_trainer.run_folder.measurements.progress import Trained
from trainyard_trainer.run_folder.measurements.startup import Startup
from trainyard_trainer.run_folder.ownership.fence import Fenced
from trainyard_trainer.run_folder.stop_signals import StoppedBySignal, fail_on_sigterm

LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that a test runs in its own process must not leave a process that forks workers."""
    monkeypatch.setenv(LOCAL_RAY_VARIABLE, "small")


CPU_RUN = Scaling(num_workers=2, use_gpu=False, cpus_per_worker=2)
GPU_RUN = Scaling(num_workers=16, use_gpu=True, cpus_per_worker=6)
ELASTIC = Scaling(
    num_workers=4, min_workers=2, use_gpu=False, cpus_per_worker=2, has_worker_places=True
)


@pytest.mark.parametrize(
    ("nodes", "scaling"),
    [
        ([{"CPU": 5}], CPU_RUN),
        ([{"CPU": 2}, {"CPU": 2}, {"CPU": 1}], CPU_RUN),
        ([{"CPU": 64, "GPU": 8}, {"CPU": 64, "GPU": 8}], GPU_RUN),
        ([{"CPU": 3, WORKER_RESOURCE: 1}] * 2, ELASTIC),
    ],
)
def test_workers_and_data_fit(nodes: list[dict[str, float]], scaling: Scaling) -> None:
    assert missing_capacity(nodes, scaling) == ""


@pytest.mark.parametrize(
    ("nodes", "scaling", "numbers"),
    [
        ([{"CPU": 4}], CPU_RUN, "need 5 CPUs; its 1 nodes have 4 CPUs and 0 GPUs"),
        ([{"CPU": 1}] * 9, CPU_RUN, "room for 0 workers"),
        ([{"CPU": 64, "GPU": 8}], GPU_RUN, "need 97 CPUs and 16 GPUs; its 1 nodes have 64 CPUs"),
        ([{"CPU": 99}], GPU_RUN, "and 0 GPUs, with room for 0 workers"),
        ([], CPU_RUN, "its 0 nodes have 0 CPUs"),
        ([{"CPU": 9, WORKER_RESOURCE: 1}], ELASTIC, "2 workers with 2 CPU and 1 trainyard_worker"),
        ([{"CPU": 9}] * 3, ELASTIC, "room for 0 workers"),
    ],
)
def test_a_cluster_that_is_too_small_is_refused_with_the_numbers(
    nodes: list[dict[str, float]], scaling: Scaling, numbers: str
) -> None:
    assert numbers in missing_capacity(nodes, scaling)


@pytest.mark.parametrize("use_gpu", [True, False])
def test_what_a_gpu_s_worker_has_in_host_memory_is_exchanged_too(
    tmp_path: Path, use_gpu: bool
) -> None:
    trainer = driver.torch_trainer(task_of(small_config(tmp_path, scaling__use_gpu=use_gpu)))
    assert trainer.backend_config.backend == ("cpu:gloo,cuda:nccl" if use_gpu else "gloo")


def test_what_ray_train_s_controller_loads_imports_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(small_config(tmp_path))
    loaded: list[Any] = []

    def controller(trainer: LeanTrainer, **arguments: Any) -> None:
        loaded.append({**arguments, "train_fn_ref": None})
        raise InterruptedError

    monkeypatch.setattr(LeanTrainer, "_initialize_and_run_controller", controller)
    monkeypatch.setattr(data_parallel_trainer, "ObjectRefWrapper", id)
    with pytest.raises(InterruptedError):
        driver.fit_workers(task, tmp_path, driver.torch_trainer)
    pickled = tmp_path / "pickled"
    pickled.write_bytes(cloudpickle.dumps(loaded[0]))
    imported = subprocess.run(
        [sys.executable, "-c", LOAD, str(pickled)], check=True, capture_output=True, text=True
    )
    assert "trainyard_trainer.on_ray.controller.process_group" in imported.stdout
    assert "'torch'" not in imported.stdout


@pytest.mark.ci
def test_the_driver_imports_nothing_that_only_workers_need() -> None:
    imported = subprocess.run(
        [sys.executable, "-c", "import sys, trainyard_trainer.on_ray.driver; print(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert "torch" in imported
    # Each of these takes half a second or more.
    heavy = {"torchvision", "torch._dynamo", "torch.distributed.checkpoint", "sympy", "sklearn"}
    assert not heavy & {*imported}
    assert "trainyard_trainer.engine.worker" not in imported


LOAD = """
import pickle, sys
from pathlib import Path
pickle.loads(Path(sys.argv[1]).read_bytes())
print(list(sys.modules))
"""


def test_output_goes_to_three_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = open_folder(small_config(tmp_path))
    copy = tmp_path / "copy"
    with Output(str(copy)) as output:
        print("before")
        output.keep_in(folder, folder.log(1))
        print("after", file=sys.stderr)
        output.flush()
        print("last")
    assert folder.read(folder.log(1)) == b"before\nafter\nlast\n"
    assert copy.read_text() == "before\nafter\nlast\n"
    assert capsys.readouterr() == ("before\nlast\n", "after\n")


def test_output_goes_on_where_no_copy_can_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Output(str(tmp_path / "none" / "copy")):
        print("text")
    assert capsys.readouterr().out == "text\n"
    assert program.LOG_VARIABLE == "TRAINYARD_LOG"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "TRAINYARD_CONFIG is not set"),
        ("{", "not a valid config"),
        ('{"name": "UPPER", "extra": 1}', "name: String should match"),
        ('{"storage": {"path": "gs://bucket"}}', "neither a folder nor s3://"),
    ],
)
def test_a_config_that_is_none_ends_with_2(
    text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {} if text is None else {CONFIG_VARIABLE: text}
    assert program.main([], environment) == 2
    assert message in capsys.readouterr().err


def test_a_storage_that_cannot_be_used_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    config = small_config(tmp_path / "file")
    assert program.main([], {CONFIG_VARIABLE: config.model_dump_json()}) == 1
    said = capsys.readouterr().err
    assert f"error: storage: {tmp_path}/file/small/lease/a1.json cannot be created: Not a" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__global_batch_size": 63, "scaling__num_workers": 2}, "Use 62 or 64"),
        ({"train__global_batch_size": 2000}, "more than the 1438 training samples"),
        ({"train__model__name": "resnet-18"}, "Did you mean resnet18"),
        ({"train__model__num_classes": 7}, "but the data has 10 classes"),
    ],
)
def test_a_config_that_cannot_be_ends_with_2_and_no_attempt(
    tmp_path: Path,
    changes: dict[str, object],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = small_config(tmp_path, **changes)
    assert program.main([], {CONFIG_VARIABLE: config.model_dump_json()}) == 2
    assert message in capsys.readouterr().err
    folder = open_folder(config)
    assert not folder.exists(folder.attempts)
    assert not folder.exists(folder.run)


# Beside the work.


class Waiting:
    """Work that ends when it is asked to, and the calls that its waiting makes meanwhile."""

    def __init__(self) -> None:
        self.is_waited_for = threading.Event()
        self.asked = threading.Event()
        self.ended = threading.Event()
        self.told: list[str] = []

    def check(self) -> None:
        self.is_waited_for.set()

    def ask(self, stopped: StoppedBySignal) -> None:
        self.asked.set()

    def work(self) -> str:
        assert self.asked.wait(LIMIT_S)
        self.ended.set()
        return "done"

    def get_signal(self) -> str:
        """The system may give a signal to any thread, such as that of the work."""
        assert self.is_waited_for.wait(LIMIT_S)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        return self.work()


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(driver, "SIGNAL_POLL_S", 0.01)
    fail_on_sigterm()
    waiting = Waiting()
    yield waiting
    waiting.asked.set()
    signal.signal(signal.SIGTERM, before)


def test_what_the_work_returns_or_raises_comes_back(waiting: Waiting) -> None:
    def fail() -> None:
        raise RunError("of the work")

    assert (
        run_in_thread(
            lambda: "done",
            ask_to_end=waiting.ask,
            report=waiting.told.append,
            check=waiting.check,
        )
        == "done"
    )
    with pytest.raises(RunError, match="of the work"):
        run_in_thread(fail, ask_to_end=waiting.ask, report=waiting.told.append, check=waiting.check)
    assert not waiting.asked.is_set()


def test_sigterm_asks_the_work_to_end_and_waits_for_that(waiting: Waiting) -> None:
    with pytest.raises(StoppedBySignal):
        run_in_thread(
            waiting.get_signal,
            ask_to_end=waiting.ask,
            report=waiting.told.append,
            check=waiting.check,
        )
    assert waiting.ended.is_set()
    assert waiting.told == ["done"]


def test_work_that_does_not_end_is_left_behind(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "STOP_WAIT_S", 0.01)
    with pytest.raises(StoppedBySignal):
        run_in_thread(
            waiting.get_signal,
            ask_to_end=lambda stopped: None,
            report=waiting.told.append,
            check=waiting.check,
        )
    assert not waiting.ended.is_set()
    assert waiting.told == []


def test_an_attempt_that_was_taken_over_waits_no_longer(waiting: Waiting) -> None:
    def check() -> None:
        raise Fenced("attempt 2 has taken over")

    with pytest.raises(Fenced, match="attempt 2 has taken over"):
        run_in_thread(waiting.work, ask_to_end=waiting.ask, report=waiting.told.append, check=check)
    assert not waiting.asked.is_set()


def test_the_driver_asks_the_workers_to_stop_in_the_run_s_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path)
    folder = open_folder(config)
    driver.ask_to_stop(task_of(config, attempt=3), folder, StoppedBySignal())
    assert folder.exists(folder.stop(3))
    assert capsys.readouterr().out == "SIGTERM: the workers save a checkpoint and leave\n"


@pytest.mark.parametrize(
    ("notice", "left_s"),
    [
        (None, None),
        (SimpleNamespace(deadline_ms=1_000_060_000), 60.0),
        (SimpleNamespace(deadline_ms=999_990_000), 0.0),
        # A notice without a time may mean now.
        (SimpleNamespace(deadline_ms=0), 0.0),
        (SimpleNamespace(deadline_ms=None), 0.0),
    ],
)
def test_a_notice_of_ray_tells_how_long_the_node_stays(
    monkeypatch: pytest.MonkeyPatch, notice: object, left_s: float | None
) -> None:
    monkeypatch.setattr("ray.train.get_preemption_info", lambda: notice)
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)
    assert worker.seconds_until_drain() == left_s


def test_an_outcome_survives_a_network_that_takes_plain_values_only() -> None:
    outcome = Outcome(
        resumed_from="s000000000100-a1.1",
        trained=Trained(epoch=1, step=10, seconds={"data": 0.5}, metrics={"val_loss": 0.25}),
        startup=Startup(began=1.0, seconds={"ray": 2.0}),
        diverged="NaN",
    )
    plain = json.loads(json.dumps(outcome.to_plain()))
    assert Outcome.from_plain(plain) == outcome


@pytest.mark.parametrize(
    ("cause", "times", "fits"),
    [
        (OutOfMemoryError("killed for want of memory"), 3, 4),
        (RayActorError(), 1, 2),
        # So often a worker may be lost, and no more.
        (OutOfMemoryError("killed for want of memory"), 4, 4),
        # What would come again is not tried again.
        (ValueError("no such backend"), 1, 1),
    ],
)
def test_a_worker_that_is_lost_while_it_starts_costs_a_restart_and_no_attempt(
    cause: Exception, times: int, fits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(small_config(tmp_path))
    done = Outcome(resumed_from=None, trained=Trained(), startup=task.startup)
    endings: list[Exception | Outcome] = [*[ray.train.ControllerError(cause)] * times, done]
    storages: list[Path] = []

    def fit(task: TrainingTask, storage: Path, make_trainer: object) -> Outcome:
        storages.append(storage)
        ending = endings.pop(0)
        if isinstance(ending, Exception):
            raise ending
        return ending

    monkeypatch.setattr(driver, "require_room", lambda scaling: None)
    monkeypatch.setattr(driver, "fit_workers", fit)
    folder = open_folder(task.config)
    is_to_end = fits == times + 1
    error, match = RunError, "Ray Train has ended: "
    if isinstance(cause, ValueError):
        error, match = ray.train.ControllerError, "no such backend"
    with nullcontext() if is_to_end else pytest.raises(error, match=match):
        assert driver.run_workers(task, folder, tmp_path, lambda: None) is done
    assert len(set(storages)) == fits
