"""A run stops in good order before its deadline, and its retries share the time of their submission."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from attempts import Attempts, read_json
from training import open_folder, small_config

from trainyard_trainer.config.limits import stop_after_s
from trainyard_trainer.config.trainer_config import CommandConfig
from trainyard_trainer.environment import ray_job_of
from trainyard_trainer.errors import Diverged, RunError, TrainerError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.run_limit import (
    RETRY_S,
    StoppedAtLimit,
    limited,
    start_clock,
)
from trainyard_trainer.run_folder.stop_signals import Leaving, StoppedBySignal, fail_on_sigterm

HEAD = {"RAY_CLUSTER_NAME": "digits-1a2b3c4d-x7k2p"}
RETRY = {"RAY_CLUSTER_NAME": "digits-1a2b3c4d-9zzzz"}
OTHER_SUBMISSION = {"RAY_CLUSTER_NAME": "digits-5e6f7a8b-x7k2p"}
RECORD = "run-limit.json"
HOUR_S = 3600


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.open(str(tmp_path), "small")


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def started_at(
    folder: RunFolder, environment: dict[str, str], now: float, retries: int = 2
) -> float:
    return start_clock(folder, HOUR_S, retries, environment, now).started_at


@pytest.mark.parametrize(("max_run_s", "stop_s"), [(3600, 3540), (120, 60), (100, 50)])
def test_the_run_stops_a_margin_before_its_deadline(max_run_s: int, stop_s: float) -> None:
    assert stop_after_s(max_run_s) == stop_s


def test_retries_count_from_the_start_of_the_first_attempt(folder: RunFolder) -> None:
    assert started_at(folder, HEAD, 100.0) == 100.0
    assert started_at(folder, RETRY, 200.0) == 100.0
    assert started_at(folder, RETRY, 300.0) == 100.0, "a lost head is replaced in its cluster"


def test_after_the_last_retry_the_time_starts_anew(folder: RunFolder) -> None:
    starts = [
        started_at(folder, {"RAY_CLUSTER_NAME": f"digits-1a2b3c4d-{number}"}, float(number))
        for number in range(5)
    ]
    assert starts == [0, 0, 0, 3, 3]


@pytest.mark.parametrize(
    ("environment", "now"),
    [
        pytest.param(OTHER_SUBMISSION, 200.0, id="another submission"),
        pytest.param(RETRY, 101.0 + HOUR_S + RETRY_S, id="too late for a retry"),
        pytest.param({}, 200.0, id="no RayJob"),
    ],
)
def test_the_time_of_another_submission_is_its_own(
    folder: RunFolder, environment: dict[str, str], now: float
) -> None:
    started_at(folder, HEAD, 100.0)
    assert started_at(folder, environment, now) == now


def test_a_withdrawn_record_is_ignored(folder: RunFolder) -> None:
    started_at(folder, HEAD, 100.0)
    folder.write(f"{folder.root}/{RECORD}", "{}")
    assert started_at(folder, RETRY, 200.0) == 200.0


@pytest.mark.parametrize(
    ("error", "retries_left"),
    [
        pytest.param(None, None, id="the run succeeded"),
        pytest.param(StoppedBySignal(), None, id="the run was stopped"),
        pytest.param(Diverged("NaN"), None, id="a retry cannot cure it"),
        pytest.param(RunError("a node is gone"), 2, id="it is retried"),
        pytest.param(Leaving(), 0, id="its RayCluster is deleted or its head is replaced"),
    ],
)
def test_a_record_stays_for_what_kuberay_starts_again(
    folder: RunFolder, tmp_path: Path, error: TrainerError | None, retries_left: int | None
) -> None:
    config = small_config(tmp_path, limits__max_run_s=HOUR_S, faults__retries=2)

    def attempt() -> None:
        with limited(folder, config, HEAD):
            if error is not None:
                raise error

    if error is None:
        attempt()
    else:
        with pytest.raises(type(error)):
            attempt()
    path = f"{folder.root}/{RECORD}"
    kept = json.loads(folder.read(path))["retries_left"] if folder.exists(path) else None
    assert kept == retries_left


def test_an_attempt_that_starts_after_the_deadline_stops_at_once(
    folder: RunFolder, tmp_path: Path
) -> None:
    config = small_config(tmp_path, limits__max_run_s=HOUR_S)
    start_clock(folder, HOUR_S, 2, HEAD, now=0.0)
    start_clock(folder, HOUR_S, 2, HEAD)
    record = json.loads(folder.read(f"{folder.root}/{RECORD}"))
    folder.write(
        f"{folder.root}/{RECORD}",
        json.dumps(record | {"started_at": record["started_at"] - HOUR_S}),
    )
    folder.write(folder.progress, json.dumps({"step": 40, "steps": 100}))
    fail_on_sigterm()
    with (
        pytest.raises(StoppedAtLimit, match=r"limits\.max_run_s = 3600, after 40 of 100 steps"),
        limited(folder, config, RETRY),
    ):
        threading.Event().wait(30)
    assert not folder.exists(f"{folder.root}/{RECORD}")


def test_the_id_of_the_job_is_that_of_ray() -> None:
    assert ray_job_of({}) is None
    assert ray_job_of({"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {}}'}) is None


@pytest.fixture
def attempts(fresh_attempts: Attempts) -> Attempts:
    """Start the processes of attempts as users start them."""
    return fresh_attempts


@pytest.mark.slow
def test_a_recipe_saves_before_its_limit_and_goes_on_from_there(attempts: Attempts) -> None:
    config = small_config(attempts.storage, train__epochs=100_000, limits__max_run_s=60)
    output = attempts.finish(config, 1, arguments=["--without-ray"])
    assert "error: the run stopped at its limit, limits.max_run_s = 60, after " in output
    summary = read_json(config, "summary.json")
    assert summary["error"].startswith("the run stopped at its limit")
    folder = open_folder(config)
    reached = json.loads(folder.read(folder.progress))["step"]
    assert summary["steps"] >= reached > 0  # progress.json is written once a second
    again = attempts.finish(config, 1, arguments=["--without-ray"])
    assert "start: checkpoint " in again
    assert read_json(config, "summary.json")["steps"] > reached


@pytest.mark.slow
def test_workers_on_ray_save_before_the_limit(attempts: Attempts) -> None:
    config = small_config(attempts.storage, train__epochs=100_000, limits__max_run_s=120)
    output = attempts.finish(config, 1)
    assert "stopped: all is saved up to step " in output
    assert "error: the run stopped at its limit" in output


@pytest.mark.ci
def test_the_program_of_the_user_gets_sigterm_before_the_limit(attempts: Attempts) -> None:
    waits = (
        "import signal, time\n"
        "def leave(*_):\n    print('saved', flush=True); raise SystemExit(0)\n"
        "signal.signal(signal.SIGTERM, leave)\nprint('waits', flush=True)\ntime.sleep(600)\n"
    )
    config = CommandConfig.model_validate(
        {
            "name": "own",
            "command": ["python", "-c", waits],
            "limits": {"max_run_s": 30},
            "scaling": {"num_workers": 1, "use_gpu": False, "cpus_per_worker": 1},
            "storage": {"path": str(attempts.storage)},
        }
    )
    output = attempts.finish(config, 1)
    assert "saved" in output
    assert "the run stopped at its limit, limits.max_run_s = 30; submitted" in output


def test_the_attempts_of_a_job_on_a_standing_cluster_share_the_time(tmp_path: Path) -> None:
    folder = RunFolder.open(str(tmp_path), "run", None)
    metadata = {"job_submission_id": "digits-1a2b3c4d-x7k2p"}
    job = {
        "RAY_CLUSTER_NAME": "trainyard",
        "TRAINYARD_STANDING_CLUSTER": "trainyard",
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"metadata": metadata}),
    }
    first, second = (job | {"TRAINYARD_ATTEMPT_OF_JOB": number} for number in "12")
    assert start_clock(folder, 100, 2, first, now=10.0).started_at == 10.0
    clock = start_clock(folder, 100, 2, second, now=50.0)
    assert (clock.submission, clock.started_at, clock.retries_left) == ("digits-1a2b3c4d", 10.0, 1)
