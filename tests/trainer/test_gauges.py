"""Gauges stay on Ray's endpoint while nothing sets them, and the driver tells the age of the newest step."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path

import pytest
import ray
from attempts import wait_for
from own_ray import own_ray
from training import open_folder, small_config, task_of

from trainyard_trainer.on_ray.gauges import StepAge, published_gauges, published_step_age

LIMIT_S = 30.0


def progress(step: int, attempt: int = 2) -> bytes:
    return json.dumps({"attempt": attempt, "step": step}).encode()


def test_the_age_counts_from_each_change_of_the_step() -> None:
    age = StepAge(attempt=2)
    found = [
        age.update(progress(step), now)
        for step, now in [(40, 0.0), (40, 5.0), (41, 10.0), (41, 25.0), (7, 30.0), (7, 31.5)]
    ]
    # At first the step is that of the checkpoint; a worker group that starts again goes back.
    assert found == [None, None, 0.0, 15.0, 0.0, 1.5]


def test_without_a_step_of_this_attempt_there_is_no_age() -> None:
    age = StepAge(attempt=2)
    assert age.update(b"", 0.0) is None
    assert age.update(b'{"att', 1.0) is None
    assert age.update(progress(9, attempt=1), 2.0) is None
    assert age.update(progress(10, attempt=1), 3.0) is None


def test_the_age_grows_while_the_storage_is_away() -> None:
    age = StepAge(attempt=2)
    age.update(progress(1), 0.0)
    age.update(progress(2), 1.0)
    assert age.update(b"", 21.0) == 20.0


SLOW = "ray_trainyard_slow_worker_step_seconds"


def lines() -> list[str]:
    """The lines of the gauges of runs on the endpoint of Ray's agent."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        found = answer.read().decode().splitlines()
    return [line for line in found if line.startswith("ray_trainyard_")]


def exported() -> dict[str, float]:
    """The values of the gauges, by name."""
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines()}


def labels_of(name: str) -> set[str]:
    """The labels of a gauge."""
    (line,) = (line for line in lines() if line.startswith(name))
    return set(line.partition("{")[2].partition("}")[0].split(","))


@pytest.mark.slow
def test_ray_keeps_what_is_published_as_long_as_the_block_runs(tmp_path: Path) -> None:
    task = task_of(small_config(tmp_path))
    folder = open_folder(task.config)
    folder.write(folder.progress, progress(4, task.attempt).decode())
    # Ray drops a gauge after twice this interval.
    with own_ray(1, RAY_metrics_report_interval_ms="1000"):
        with published_step_age(task, folder, refresh_s=0.3):
            with published_gauges(task, 0, refresh_s=0.3) as publish:
                folder.write(folder.progress, progress(5, task.attempt).decode())
                publish({"step": 5})
                assert wait_for(lambda: exported().get("ray_trainyard_step") == 5, LIMIT_S)
                time.sleep(8.0)
                found = exported()
                assert found["ray_trainyard_step"] == 5
                assert 5 < found["ray_trainyard_step_age_seconds"] < LIMIT_S
                slow = {"rank": 1, "node": "pod-b", "step_s": 0.9, "median_s": 0.3}
                publish({"step": 6, "slow_workers": [slow]})
                assert wait_for(lambda: exported().get(SLOW) == 0.9, LIMIT_S)
                assert {'node="pod-b"', 'rank="1"', 'run="small"'} <= labels_of(SLOW)
                # It is not slow any more.
                publish({"step": 7})
                assert wait_for(lambda: SLOW not in exported(), LIMIT_S)
            assert wait_for(lambda: "ray_trainyard_step" not in exported(), LIMIT_S)
            assert "ray_trainyard_step_age_seconds" in exported()
        assert wait_for(lambda: not exported(), LIMIT_S)
