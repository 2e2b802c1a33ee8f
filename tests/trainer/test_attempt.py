"""One attempt from its config to its summary, whoever trains: what it refuses, records and delivers."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_run import GOAL
from training import open_folder, small_config

from trainyard_trainer.attempt import attempt
from trainyard_trainer.attempt.attempt import Fit, with_absolute_path
from trainyard_trainer.attempt.checks import check_data
from trainyard_trainer.checkpointing.checkpoint import (
    MODEL,
    STATE,
    VALIDATION,
    Checkpoints,
)
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.prepared import DatasetInfo, Prepared, Split
from trainyard_trainer.engine.outcome import Outcome
from trainyard_trainer.engine.task import TrainingTask
from trainyard_trainer.engine.worker import work
from trainyard_trainer.errors import ConfigError, Diverged, RunError, TrainerError
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.image_classification.model import build_model
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.log import Output
from trainyard_trainer.run_folder.measurements.progress import TIME_PHASES, Trained, read_lines
from trainyard_trainer.run_folder.ownership.fence import Fenced
from trainyard_trainer.run_folder.ownership.lease import Lease
from trainyard_trainer.run_folder.run_record import without_record
from trainyard_trainer.run_folder.stop_signals import StoppedBySignal
from trainyard_trainer.versions import versions


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def run(config: TrainerConfig, fit: Fit) -> dict[str, Any]:
    """Run an attempt; returns its summary."""
    with Output() as output:
        attempt.run(config, output, fit)
    return summary(config)


def summary(config: TrainerConfig) -> dict[str, Any]:
    folder = open_folder(config)
    return json.loads(folder.read(folder.summary))


def here(task: TrainingTask, folder: RunFolder, lease: Lease) -> Outcome:
    """Train in this process."""
    return work(task, Worker(device=torch.device("cpu")))


def nothing(task: TrainingTask, folder: RunFolder, lease: Lease) -> Outcome:
    raise AssertionError("nothing is left to train")


def saving(*accuracies: float, finish: Callable[[], None] = lambda: None) -> Fit:
    """Epochs that end with these accuracies, of a model whose last biases are the epoch's number."""

    def fit(task: TrainingTask, folder: RunFolder, lease: Lease) -> Outcome:
        weights = build_model(task.config.train.model).state_dict()
        trained = Trained()
        for epoch, accuracy in enumerate(accuracies, start=1):
            weights["fc.bias"].fill_(epoch)
            trained = Trained(
                epoch=epoch,
                step=epoch * 11,
                samples=epoch * 1408,
                train_s=epoch * 2.0,
                seconds={"compute": epoch * 1.0},
                metrics={"val_accuracy": accuracy, "val_loss": 1 - accuracy},
            )
            Checkpoints(folder).save(
                trained,
                attempt=task.attempt,
                group=1,
                contents={
                    MODEL: weights,
                    STATE: {"learner": {"average": {}, "average_updates": 0}},
                    VALIDATION: {
                        "num_samples": 359,
                        "loss": 1 - accuracy,
                        "accuracy": accuracy,
                        "confusion": [[0, 0, 359]],
                        "worst": [],
                    },
                },
                facts={
                    "config": task.config.model_dump(mode="json"),
                    "data": asdict(task.data.info),
                    "goal": asdict(GOAL),
                },
            )
        finish()
        return Outcome(resumed_from=None, trained=trained, startup=task.startup)

    return fit


def failing(error: BaseException) -> Fit:
    def fail() -> None:
        raise error

    return saving(0.5, finish=fail)


def delivered_epoch(config: TrainerConfig) -> float:
    folder = open_folder(config)
    return float(torch.load(io.BytesIO(folder.read(folder.model)))["fc.bias"][0])


# Checks.


def data_of(num_train: int) -> Prepared:
    images = DatasetInfo(
        source="any", shape=(1, 8, 8), classes=tuple("0123456789"), mean=(0.3,), std=(0.4,)
    )
    return Prepared(
        info=images,
        train=Split(files=("train",), rows=(num_train,)),
        valid=Split(files=("valid",), rows=(10,)),
        path="/unused",
        endpoint=None,
    )


WHOLE: dict[str, Any] = {"data__drop_last": False}


@pytest.mark.parametrize(
    ("num_train", "workers", "changes"),
    [
        (129, 1, WHOLE),
        (130, 2, WHOLE),
        # Three samples on two workers: two on the first, one on the second.
        (131, 2, WHOLE),
        # Five samples on eight workers.
        (133, 8, WHOLE),
        # Parts of 32 samples, and a single one left of 33.
        (161, 1, WHOLE | {"train__micro_batch_size": 32}),
        (128, 1, {"train__micro_batch_size": 1}),
        (128, 128, {}),
    ],
)
def test_single_images_are_refused_for_a_model_with_batch_norm(
    num_train: int, workers: int, changes: dict[str, Any]
) -> None:
    config = small_config(Path("/unused"), scaling__num_workers=workers, **changes)
    with pytest.raises(ConfigError) as refusal:
        check_data(config, data_of(num_train))
    message = str(refusal.value)
    assert f"= 128 over {workers} workers leaves single images of the {num_train}" in message
    assert "shufflenet_v2_x0_5 cannot learn from one alone (batch norm)" in message
    assert "Use data.drop_last: true, another global_batch_size or micro_batch_size" in message


@pytest.mark.parametrize(
    ("num_train", "workers", "changes"),
    [
        (129, 1, {}),
        (129, 1, WHOLE | {"train__model__name": "vit_b_16", "train__model__image_size": 32}),
        (130, 1, WHOLE),
        (132, 2, WHOLE),
        # Two samples on the first worker and none on the others is what `take part` is for.
        (256, 2, WHOLE),
        (162, 1, WHOLE | {"train__micro_batch_size": 32}),
    ],
)
def test_what_leaves_no_single_image_is_allowed(
    num_train: int, workers: int, changes: dict[str, Any]
) -> None:
    config = small_config(Path("/unused"), scaling__num_workers=workers, **changes)
    assert check_data(config, data_of(num_train)).num_samples == num_train


def test_a_config_that_cannot_be_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Use 126 or 129"):
        run(small_config(tmp_path, scaling__num_workers=3), nothing)
    assert list(tmp_path.iterdir()) == []


def test_paths_become_absolute_for_processes_in_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = small_config(
        Path("runs"), data__source="./pictures", data__valid_source="../others/valid"
    )
    found = with_absolute_path(config)
    assert found.storage.path == f"{tmp_path}/runs"
    assert found.data.source == f"{tmp_path}/pictures"
    assert found.data.valid_source == f"{tmp_path.parent}/others/valid"
    assert with_absolute_path(found) == found


@pytest.mark.parametrize("source", ["digits", "s3://bucket/data", "/data/set"])
def test_what_is_the_same_everywhere_stays_as_it_is(source: str) -> None:
    config = small_config(Path("/unused"), storage__path="s3://bucket/runs", data__source=source)
    assert with_absolute_path(config) == config


# Success.

KEYS = {
    *("name", "outcome", "error", "attempts", "record", "resumed_from", "workers"),
    *("loss", "accuracy", "val_loss", "val_accuracy", "best_val_loss", "best_val_accuracy"),
    *("best_epoch", "checkpoint"),
    *("epochs", "steps", "samples_seen", "stopped_early", "bad_samples", "dropped_per_epoch"),
    *("train_s", "samples_per_s", "seconds", "goodput", "startup"),
    *("model", "metrics", "report"),
}


def test_a_run_ends_with_model_report_and_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path)
    found = run(config, here)
    assert found.keys() == KEYS
    known = {
        "name": "small",
        "outcome": "succeeded",
        "error": None,
        "attempts": 1,
        "resumed_from": None,
        "workers": 1,
        "epochs": 2,
        "steps": 22,
        "samples_seen": 2816,
        "stopped_early": False,
        "bad_samples": 0,
        "dropped_per_epoch": 30,
        "checkpoint": "s000000002816-a1.1",
        "model": f"{tmp_path}/small/model.pt",
    }
    assert found.items() >= known.items()
    assert found["seconds"].keys() == set(TIME_PHASES)
    assert found["best_val_accuracy"] >= found["val_accuracy"] > 0

    folder = open_folder(config)
    for file in (folder.model, folder.report, folder.metrics, folder.model_facts):
        assert folder.exists(file)
    line = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(line.removeprefix("summary ")) == without_record(found)
    (record,) = read_lines(folder, folder.attempts)
    told = {"attempt", "time", "resumed_from", "workers", "versions"}
    assert record.keys() == told | {
        *("began", "imports_s", "lease_s", "reached_step", "reached_loop_s")
    }
    kept = json.loads(folder.read(folder.run))
    (attempt,) = kept.pop("record")
    assert kept == config.model_dump(mode="json")
    assert attempt["ended"] is not None
    assert attempt["cpu_hours"] > 0


@pytest.mark.parametrize(
    ("changes", "epoch"),
    [
        ({}, 3),
        ({"checkpoint__deliver": "best"}, 2),
        ({"checkpoint__deliver": "best", "checkpoint__best": "val_loss"}, 2),
    ],
)
def test_the_last_or_the_best_model_is_delivered(
    tmp_path: Path, changes: dict[str, Any], epoch: int
) -> None:
    config = small_config(tmp_path, train__epochs=3, **changes)
    found = run(config, saving(0.5, 0.9, 0.7))
    assert delivered_epoch(config) == epoch
    assert found["checkpoint"] == f"s{epoch * 1408:012}-a1.1"
    # The summary tells of the whole run, whatever was delivered.
    assert (found["val_accuracy"], found["epochs"], found["steps"]) == (0.7, 3, 33)
    assert (found["best_val_accuracy"], found["best_epoch"]) == (0.9, 2)
    assert found["seconds"]["compute"] == 3.0


@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed"])
def test_an_exchange_that_nobody_measures_is_not_told(tmp_path: Path, strategy: str) -> None:
    found = run(small_config(tmp_path, train__strategy=strategy), saving(0.5, 0.9))
    assert found["seconds"].keys() == set(TIME_PHASES) - {"communication"}
    report = open_folder(small_config(tmp_path)).read(f"{tmp_path}/small/report.html").decode()
    assert "training steps, including communication" in report
    assert "Training steps, including communication, took" in report
    assert "Communication" not in report


def test_a_best_model_that_is_damaged_is_not_replaced_in_silence(tmp_path: Path) -> None:
    config = small_config(tmp_path, train__epochs=3, checkpoint__deliver="best")

    def damage() -> None:
        (best,) = (tmp_path / "small/checkpoints").glob("s000000002816*")
        (best / MODEL).write_bytes(b"")

    with pytest.raises(RunError, match=r"s000000002816-a1\.1, cannot be delivered: model\.pt is 0"):
        run(config, saving(0.5, 0.9, 0.7, finish=damage))
    # As the message says, in either way.
    folder = open_folder(config)
    run(small_config(tmp_path, train__epochs=3), nothing)
    assert delivered_epoch(config) == 3
    folder.delete(f"{folder.checkpoints}/s000000002816-a1.1")
    run(config, nothing)
    assert delivered_epoch(config) == 3


def test_the_moving_average_is_what_was_validated_and_is_delivered(tmp_path: Path) -> None:
    config = small_config(tmp_path, train__epochs=1, train__ema_decay=0.9)
    run(config, here)
    folder = open_folder(config)
    checkpoints = Checkpoints(folder)
    (name,) = checkpoints.names()
    average = checkpoints.load(name, STATE)["learner"]["average"]
    weights = checkpoints.load(name, MODEL)
    delivered = torch.load(io.BytesIO(folder.read(folder.model)), weights_only=True)
    assert delivered.keys() == weights.keys()
    for key, value in delivered.items():
        assert torch.equal(value, average[key])
    assert not torch.equal(delivered["fc.weight"], weights["fc.weight"])
    build_model(config.train.model).load_state_dict(delivered)


def test_a_run_that_is_complete_is_delivered_again_and_not_trained(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    run(config, saving(0.5, 0.6))
    folder = open_folder(config)
    folder.delete(folder.model)
    found = run(config, nothing)
    assert (found["attempts"], found["resumed_from"]) == (2, "s000000002816-a1.1")
    assert delivered_epoch(config) == 2
    first, second = read_lines(folder, folder.attempts)
    assert (first["resumed_from"], second["resumed_from"]) == (None, "s000000002816-a1.1")


def test_a_run_that_goes_on_has_no_outcome_until_it_ends(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    with pytest.raises(RunError):
        run(config, failing(RunError("first")))

    def look(task: TrainingTask, folder: RunFolder, lease: Lease) -> Outcome:
        assert not folder.exists(folder.summary)
        return saving(0.5, 0.6)(task, folder, lease)

    assert run(config, look)["outcome"] == "succeeded"


# Failure.


@pytest.mark.parametrize(
    ("fit", "kind", "message"),
    [
        (failing(RunError("a worker died\n  and more")), RunError, "a worker died"),
        (failing(KeyError("a bug")), KeyError, "'a bug'"),
        (failing(ValueError()), ValueError, "ValueError"),
        (
            failing(KeyboardInterrupt()),
            RunError,
            "the run was interrupted; started again, it goes on",
        ),
        (
            lambda task, folder, lease: Outcome(
                resumed_from=None,
                trained=Trained(),
                startup=task.startup,
                diverged="the loss became NaN",
            ),
            Diverged,
            "the loss became NaN",
        ),
        (saving(0.5), RunError, "training ended, but the last intact checkpoint in "),
        (
            lambda task, folder, lease: Outcome(
                resumed_from=None, trained=Trained(), startup=task.startup
            ),
            RunError,
            "training ended, but the last intact checkpoint in ",
        ),
    ],
)
def test_a_failed_attempt_says_why_in_its_summary(
    tmp_path: Path, fit: Fit, kind: type[Exception], message: str
) -> None:
    config = small_config(tmp_path)
    with pytest.raises(kind):
        run(config, fit)
    found = summary(config)
    # What was interrupted goes on when it is started again.
    assert found["outcome"] == ("stopped" if "interrupted" in message else "failed")
    assert found["error"].startswith(message)
    assert "\n" not in found["error"]
    assert found.keys() == KEYS - {"checkpoint", "bad_samples", "dropped_per_epoch", "startup"}
    # It is over: the next attempt need not wait for it.
    assert run(config, saving(0.5, 0.6))["attempts"] == 2


def test_data_that_do_not_fit_are_a_failed_attempt_without_a_record(tmp_path: Path) -> None:
    config = small_config(tmp_path, train__model__num_classes=7)
    with pytest.raises(ConfigError, match="num_classes = 7"):
        run(config, nothing)
    assert "num_classes = 7" in summary(config)["error"]
    folder = open_folder(config)
    assert read_lines(folder, folder.attempts) == []
    assert not folder.exists(folder.run)


def test_an_error_of_the_system_is_not_taken_for_one_of_the_storage(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError, match="by a peer"):
        run(small_config(tmp_path), failing(ConnectionResetError("by a peer")))
    assert summary(small_config(tmp_path))["error"] == "by a peer"


def test_an_attempt_that_was_taken_over_leaves_the_summary_to_the_other(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    with pytest.raises(Fenced):
        run(config, failing(Fenced("attempt 2 has taken over")))
    folder = open_folder(config)
    assert not folder.exists(folder.summary)


def test_sigterm_ends_an_attempt_in_good_order(tmp_path: Path) -> None:
    config = small_config(tmp_path)

    goes_on = threading.Event()

    def be_stopped(task: TrainingTask, folder: RunFolder, lease: Lease) -> Outcome:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            return saving(0.5, 0.6)(task, folder, lease)
        except StoppedBySignal:
            # Whoever is impatient sends it twice.
            os.kill(os.getpid(), signal.SIGTERM)
            goes_on.set()
            raise

    with pytest.raises(
        StoppedBySignal, match="stopped by SIGTERM; started again, it goes on from there"
    ):
        run(config, be_stopped)
    assert goes_on.is_set()
    assert summary(config)["error"] == str(StoppedBySignal())
    assert summary(config)["outcome"] == "stopped"
    assert isinstance(StoppedBySignal(), TrainerError)
    assert StoppedBySignal.exit_code == 1
    assert open_folder(config).exists(f"{tmp_path}/small/lease/a1.ended")


def test_versions_are_those_of_the_packages_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions().keys() == {"python", "ray", "torch", "torchvision"}
    known = metadata.version

    def version(name: str) -> str:
        if name == "ray":
            raise metadata.PackageNotFoundError
        return known(name)

    monkeypatch.setattr(metadata, "version", version)
    assert versions().keys() == {"python", "torch", "torchvision"}
