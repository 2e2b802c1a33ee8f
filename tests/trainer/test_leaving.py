"""A pod that is about to go: its preStop hook waits until the driver in it has given its run back."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from attempts import Attempts, committed, ray_config, read_records, wait_for
from test_command import command_config

from trainyard_trainer.on_ray.leaving import VARIABLE

PLATFORM = Path(__file__).parents[2] / "launcher/trainyard/platform.yaml"
LIMIT_S = 40.0
WAITS = "trap 'echo saved; exit 0' TERM; echo waits; while :; do sleep 0.1; done"


@pytest.fixture
def environment(attempts: Attempts) -> dict[str, str]:
    return {VARIABLE: f"{attempts.scratch}/leaving"}


def hook(environment: dict[str, str]) -> None:
    """What the kubelet does before it ends the head's container."""
    shape = yaml.safe_load(PLATFORM.read_text())["rayClusterSpec"]["headGroupSpec"]
    (head,) = shape["template"]["spec"]["containers"]
    command = head["lifecycle"]["preStop"]["exec"]["command"]
    subprocess.run(
        command, env={"PATH": "/usr/bin:/bin", **environment}, check=True, timeout=LIMIT_S
    )


@pytest.fixture
def driver(
    attempts: Attempts, environment: dict[str, str], request: pytest.FixtureRequest
) -> Iterator[Any]:
    """Of a program that leaves on SIGTERM."""
    config = command_config(attempts, "sh", "-c", WAITS)
    driver = attempts.start(config, environment)
    assert driver.stdout is not None
    assert any(line.strip() == "waits" for line in driver.stdout)
    yield driver
    driver.kill()


@pytest.mark.ci
def test_the_run_is_given_back_and_the_driver_waits_for_its_end(
    attempts: Attempts, driver: Any, environment: dict[str, str]
) -> None:
    hook(environment)
    folder = attempts.storage / "own"
    assert (folder / "lease/a1.ended").exists()
    assert "saved\nthis pod goes away" in (folder / "logs/attempt-1.log").read_text()
    # A driver that ends, however well, is taken for a failed job; and a summary for the end of the run.
    assert not (folder / "summary.json").exists()
    driver.terminate()
    time.sleep(0.2)
    assert driver.poll() is None


@pytest.mark.ci
def test_a_pod_whose_driver_is_dead_goes_at_once_and_the_next_driver_there_stays(
    attempts: Attempts, driver: Any, environment: dict[str, str]
) -> None:
    driver.kill()
    driver.wait()
    hook(environment)
    attempts.finish(command_config(attempts, "sleep", "1"), 0, environment)


@pytest.mark.slow
def test_workers_save_before_the_pod_goes(attempts: Attempts, environment: dict[str, str]) -> None:
    never = {"checkpoint__every_epochs": 500, "checkpoint__every_s": None}
    config = ray_config(attempts, workers=2, train__epochs=500, **never)
    attempts.start(config, environment)
    assert wait_for(lambda: attempts.read(config, "metrics.jsonl"), 120)
    assert committed(config) == []
    hook(environment)
    (saved,) = committed(config)
    assert read_records(config, "metrics.jsonl")[-1]["samples"] <= int(saved[1:13])
    assert (attempts.storage / config.name / "lease/a1.ended").exists()
