"""Whole attempts, as `python -m trainer` starts them, on a real Ray of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from training import small_config

from trainer.config import CONFIG_VARIABLE, TrainerConfig

PACKAGES = Path(__file__).parents[2] / "train_image"


class Attempts:
    """Starts attempts at runs in one storage folder, and removes what they leave of Ray."""

    def __init__(self, storage: Path) -> None:
        self.storage = storage
        # Short, because sockets lie below it.
        self.scratch = Path(tempfile.mkdtemp(prefix="ty", dir="/tmp"))

    def start(
        self, config: TrainerConfig, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
            "PYTHONPATH": str(PACKAGES),
            "TMPDIR": str(self.scratch),
            CONFIG_VARIABLE: config.model_dump_json(),
            **(environment or {}),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "trainer"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(
        self, config: TrainerConfig, code: int = 0, environment: Mapping[str, str] | None = None
    ) -> str:
        """Run an attempt to its end; returns what it printed."""
        process = self.start(config, environment)
        output, _ = process.communicate()
        assert process.returncode == code, output
        return output

    def processes(self, title: str = "") -> list[int]:
        """Living processes with that in their title, ours by the folder in their environment."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                is_ours = str(self.scratch).encode() in (folder / "environ").read_bytes()
                if is_ours and title.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except (OSError, ValueError):
                continue
        return found

    def clear(self) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        shutil.rmtree(self.scratch, ignore_errors=True)


def wait_for(condition: Callable[[], Any], timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


@pytest.fixture
def attempts(tmp_path: Path) -> Iterator[Attempts]:
    started = Attempts(tmp_path)
    yield started
    started.clear()


def ray_config(attempts: Attempts, workers: int = 2, **changes: Any) -> TrainerConfig:
    return small_config(attempts.storage, scaling__num_workers=workers, **changes)


def read_json(config: TrainerConfig, file: str) -> dict[str, Any]:
    return json.loads((Path(config.storage.path) / config.name / file).read_text())


def read_records(config: TrainerConfig, file: str) -> list[dict[str, Any]]:
    text = (Path(config.storage.path) / config.name / file).read_text()
    return [json.loads(line) for line in text.splitlines()]


def lines(output: str, word: str) -> list[dict[str, Any]]:
    """What follows a word at the beginning of a line, as JSON."""
    found = (line for line in output.splitlines() if line.startswith(f"{word} {{"))
    return [json.loads(line.removeprefix(word)) for line in found]


def committed(config: TrainerConfig) -> list[str]:
    folder = Path(config.storage.path) / config.name / "checkpoints"
    return sorted(manifest.parent.name for manifest in folder.glob("*/manifest.json"))


def check_metrics(config: TrainerConfig, epochs: int) -> None:
    """Each epoch has ended once, and no step is there twice."""
    records = read_records(config, "metrics.jsonl")
    steps = [record["step"] for record in records]
    assert steps == sorted(set(steps))
    ended = [record for record in records if record["kind"] == "epoch"]
    assert [record["epoch"] for record in ended] == list(range(1, epochs + 1))
    assert [record["step"] for record in ended] == [11 * epoch for epoch in range(1, epochs + 1)]
    assert all({"epoch", "step", "samples", "loss"} <= record.keys() for record in records)


@pytest.mark.parametrize("loader", ["torch", "ray"])
def test_a_run_leaves_all_its_files(attempts: Attempts, loader: str) -> None:
    config = ray_config(attempts, data__loader=loader)
    output = attempts.finish(config)
    folder = attempts.storage / "small"
    summary = read_json(config, "summary.json")
    assert lines(output, "summary") == [summary]
    assert output.splitlines()[-1].startswith("summary ")
    assert summary == summary | {
        "outcome": "succeeded",
        "epochs": 2,
        "samples_seen": 2 * 11 * 128,
        "attempts": 1,
        "resumed_from": None,
        "workers": 2,
        "model": str(folder / "model.pt"),
        "metrics": str(folder / "metrics.jsonl"),
        "report": str(folder / "report.html"),
        "error": None,
    }
    # A share of the 359 validation images, each of which was counted once.
    assert summary["val_accuracy"] * 359 == pytest.approx(
        round(summary["val_accuracy"] * 359), abs=1e-3
    )
    assert summary["images_per_s"] > 0
    check_metrics(config, 2)

    shown = lines(output, "progress")
    assert shown[0]["percent"] == 0
    assert shown[-1] == read_json(config, "progress.json")
    assert (shown[-1]["percent"], shown[-1]["eta_s"], shown[-1]["step"]) == (100, 0, 22)
    assert "<svg" in (folder / "report.html").read_text()
    # The last line comes when the attempt has ended, and is in standard output alone.
    log = (folder / "logs" / "attempt-1.log").read_text()
    assert log.splitlines() == output.splitlines()
    assert read_json(config, "run.json") == config.model_dump(mode="json")
    assert len(committed(config)) == 2
    # Nothing of Ray's stays, in the run's folder or elsewhere.
    assert {path.name for path in folder.iterdir()} == {
        *("attempts.jsonl", "checkpoints", "data", "logs", "metrics.jsonl", "model.pt"),
        *("progress.json", "report.html", "run.json", "summary.json"),
    }
    assert wait_for(lambda: not attempts.processes(), 60)
    assert list(attempts.scratch.iterdir()) == []

    if loader == "torch":
        # Again: there is nothing to do, and Ray is not even started.
        again = attempts.finish(config)
        assert "cluster:" not in again
        (repeated,) = lines(again, "summary")
        last = committed(config)[-1]
        assert repeated == summary | {"attempts": 2, "resumed_from": last}
        check_metrics(config, 2)


def test_a_run_survives_the_loss_of_a_worker_and_then_of_its_driver(attempts: Attempts) -> None:
    config = ray_config(attempts, train__epochs=15, checkpoint__keep=99)
    driver = attempts.start(config)

    # A worker dies after the first checkpoint: the same attempt goes on.
    assert wait_for(lambda: committed(config), 120)
    os.kill(attempts.processes("RayTrainWorker")[0], signal.SIGKILL)
    before = len(committed(config))
    assert wait_for(lambda: len(committed(config)) > before, 120)
    assert driver.poll() is None

    # The driver dies, and takes its workers along; the next attempt goes on.
    driver.kill()
    driver.communicate()
    # (Ray's own agents, which write nothing, may take a minute longer.)
    assert wait_for(lambda: not attempts.processes("RayTrainWorker"), 60)
    saved = committed(config)
    assert 0 < len(saved) < 15
    assert all(name.endswith("-a1") for name in saved)
    output = attempts.finish(config)
    assert f"start: checkpoint {saved[-1]}" in output
    assert lines(output, "progress")[0]["step"] == 11 * len(saved)

    summary = read_json(config, "summary.json")
    assert (summary["attempts"], summary["resumed_from"]) == (2, saved[-1])
    assert [record["resumed_from"] for record in read_records(config, "attempts.jsonl")] == [
        None,
        saved[-1],
    ]
    assert len(committed(config)) == 15
    check_metrics(config, 15)


def test_sigterm_ends_an_attempt_in_good_order(attempts: Attempts) -> None:
    config = ray_config(attempts, workers=1, train__epochs=500)
    driver = attempts.start(config)
    assert wait_for(lambda: committed(config), 120)
    driver.terminate()
    output, _ = driver.communicate()
    assert driver.returncode == 1, output
    assert "error: the run was stopped by SIGTERM" in output
    summary = read_json(config, "summary.json")
    assert summary["outcome"] == "failed"
    assert summary["error"].startswith("the run was stopped by SIGTERM")
    assert summary["samples_seen"] > 0
    assert wait_for(lambda: not attempts.processes(), 60)
    assert list(attempts.scratch.iterdir()) == []


def test_a_worker_that_fails_each_time_fails_the_run_with_its_reason(attempts: Attempts) -> None:
    config = ray_config(
        attempts,
        workers=1,
        train__optimizer={"name": "sgd", "learning_rate": 1e30},
        faults__worker_failures=0,
    )
    output = attempts.finish(config, code=1)
    assert "error: worker 0 failed, after 0 restarts: RunError: the loss became" in output
    summary = read_json(config, "summary.json")
    assert summary["outcome"] == "failed"
    assert "Lower train.optimizer.learning_rate" in summary["error"]
    assert (summary["val_accuracy"], summary["samples_seen"]) == (None, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU that torch can use")
def test_gpus_that_only_ray_counts_end_the_run_with_node_and_remedy(attempts: Attempts) -> None:
    # A cluster as KubeRay gives it to the driver: by its address, with GPUs.
    environment = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    code = (
        "import ray, sys; print(ray.init(address='local', num_cpus=3, num_gpus=2, "
        f"include_dashboard=False, _temp_dir='{attempts.scratch}/ray').address_info['gcs_address'],"
        " flush=True); sys.stdin.read()"
    )
    cluster = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment, "TMPDIR": str(attempts.scratch)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert cluster.stdout
    environment["RAY_ADDRESS"] = cluster.stdout.readline().strip()
    config = ray_config(attempts, scaling__use_gpu=True)
    output = attempts.finish(config, code=1, environment=environment)
    cluster.communicate("")
    assert "cluster: 1 node, 3 CPUs, 2 GPUs" in output
    assert "error: CUDA is missing: Ray counts GPUs on 1 nodes" in output
    assert f"node {socket.gethostname()}: torch.cuda.is_available() is False" in output
    assert "Install the NVIDIA driver and device plugin there" in output
    assert read_json(config, "summary.json")["outcome"] == "failed"
