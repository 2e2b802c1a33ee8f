"""Whole attempts, as `python -m trainyard_trainer` starts them, on a real Ray of their own."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import sys

import pytest
import torch
from attempts import (
    Attempts,
    check_metrics,
    committed,
    lines,
    ray_config,
    read_json,
    read_records,
    wait_for,
)

KEPT = {f"trainyard-data-{os.getuid()}", f"torchinductor_{getpass.getuser()}"}
"""What stays in the folder for temporary files: the machine's copy of the data, and PyTorch's cache."""


@pytest.fixture
def attempts(fresh_attempts: Attempts) -> Attempts:
    """Start the processes of attempts as users start them: their start is tested."""
    return fresh_attempts


@pytest.mark.ci
@pytest.mark.parametrize("loader", ["torch", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_run_leaves_all_its_files(attempts: Attempts, loader: str) -> None:
    config = ray_config(attempts, data__loader=loader)
    output = attempts.finish(config)
    folder = attempts.storage / "small"
    summary = read_json(config, "summary.json")
    record = summary.pop("record")
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
    assert summary["samples_per_s"] > 0
    check_metrics(config, 2)

    shown = lines(output, "progress")
    assert shown[0]["percent"] == 0
    assert shown[-1] == read_json(config, "progress.json")
    assert (shown[-1]["percent"], shown[-1]["eta_s"], shown[-1]["step"]) == (100, 0, 22)
    assert "<svg" in (folder / "report.html").read_text()
    # The last line comes when the attempt has ended, and is in standard output alone.
    log = (folder / "logs" / "attempt-1.log").read_text()
    assert log.splitlines() == output.splitlines()
    assert read_json(config, "run.json") == config.model_dump(mode="json") | {"record": record}
    ((node,),) = ([(node["name"], len(node["id"])) for node in one["nodes"]] for one in record)
    assert node == (socket.gethostname(), 56)
    assert len(committed(config)) == 2
    # Nothing of Ray's stays, in the run's folder or elsewhere.
    assert {path.name for path in folder.iterdir()} == {
        *("attempts.jsonl", "checkpoints", "data", "logs", "metrics.jsonl", "model.pt"),
        *("lease", "model.json", "progress.json", "report.html", "run.json", "starts.jsonl"),
        *("summary.json", "tensorboard", "workers.json"),
    }
    assert wait_for(lambda: not attempts.processes(), 60)
    assert {path.name for path in attempts.scratch.iterdir()} <= KEPT

    if loader == "torch":
        # Again: there is nothing to do, and Ray is not even started.
        again = attempts.finish(config)
        assert "cluster:" not in again
        (repeated,) = lines(again, "summary")
        last = committed(config)[-1]
        assert repeated.pop("startup").keys() == {"began", "lease"}
        del summary["startup"], summary["goodput"]
        assert repeated.pop("goodput")["steps_s"] > 0
        assert repeated == summary | {"attempts": 2, "resumed_from": last}
        check_metrics(config, 2)


@pytest.mark.slow
def test_a_run_survives_the_loss_of_a_worker_and_then_of_its_driver(attempts: Attempts) -> None:
    config = ray_config(attempts, train__epochs=15, checkpoint__keep=99)
    driver = attempts.start(config)

    # A worker dies after the first checkpoint: the same attempt goes on.
    assert wait_for(lambda: committed(config), 120)
    workers = attempts.processes("RayTrainWorker")
    assert {os.getpriority(os.PRIO_PROCESS, each) for each in workers} == {0}
    os.kill(workers[0], signal.SIGKILL)
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
    assert {name.partition("-")[2] for name in saved} == {"a1.1", "a1.2"}
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


@pytest.mark.slow
def test_sigterm_ends_an_attempt_in_good_order(attempts: Attempts) -> None:
    config = ray_config(
        attempts, workers=1, train__epochs=500, checkpoint__every_epochs=500, train__seed=1
    )
    driver = attempts.start(config)
    assert wait_for(lambda: attempts.read(config, "metrics.jsonl"), 120)
    assert committed(config) == []
    driver.terminate()
    output, _ = driver.communicate()
    assert driver.returncode == 1, output
    # The workers have saved where they were, in mid-epoch or not.
    (saved,) = committed(config)
    assert read_records(config, "metrics.jsonl")[-1]["samples"] <= int(saved[1:13])
    assert "error: the run was stopped by SIGTERM" in output
    summary = read_json(config, "summary.json")
    assert summary["outcome"] == "stopped"
    assert summary["error"].startswith("the run was stopped by SIGTERM")
    assert summary["samples_seen"] > 0
    # Which pod and process has which rank, for whoever wants to look inside.
    (worker,) = read_json(config, "workers.json")["workers"]
    assert (worker["rank"], worker["node"]) == (0, socket.gethostname())
    assert worker["process"] > 0
    assert len(worker["ray_worker"]) == 56
    assert wait_for(lambda: not attempts.processes(), 60)
    assert {path.name for path in attempts.scratch.iterdir()} <= KEPT


@pytest.mark.ci
@pytest.mark.parametrize("program", ["gcs_server", "raylet/raylet"])
def test_sigterm_while_ray_starts_ends_the_attempt(attempts: Attempts, program: str) -> None:
    config = ray_config(attempts, workers=1, train__epochs=500)
    driver = attempts.start(config)
    assert wait_for(lambda: attempts.processes(program), 120)
    driver.terminate()
    output, _ = driver.communicate()
    assert driver.returncode == 1, output
    assert "error: the run was stopped by SIGTERM" in output
    assert read_json(config, "summary.json")["outcome"] == "stopped"
    assert wait_for(lambda: not attempts.processes(), 60)


@pytest.mark.ci
def test_a_loss_that_explodes_fails_the_run_at_once_with_its_reason(attempts: Attempts) -> None:
    config = ray_config(
        attempts,
        workers=1,
        train__optimizer={"name": "sgd", "learning_rate": 1e30},
    )
    # Restarts would lead there again, and are not tried.
    output = attempts.finish(config, code=1)
    assert "error: the loss or a weight became NaN or infinite in steps 1 to" in output
    summary = read_json(config, "summary.json")
    assert summary["outcome"] == "failed"
    assert "Lower train.optimizer.learning_rate" in output
    assert (summary["val_accuracy"], summary["samples_seen"]) == (None, 0)


@pytest.mark.ci
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
    assert "error: CUDA is missing: Ray found GPUs on 1 nodes" in output
    assert f"node {socket.gethostname()}: torch.cuda.is_available() is False" in output
    assert "Install the NVIDIA driver and device plugin there" in output
    assert read_json(config, "summary.json")["outcome"] == "failed"
