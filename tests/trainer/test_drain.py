"""A node that is taken away with a notice: left in time, with no step lost and no failure on the bill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from attempts import Attempts, committed, ray_config, read_json, read_records, wait_for

DEADLINE_S = 12


@pytest.fixture
def attempts(fresh_attempts: Attempts) -> Attempts:
    """Start the processes of attempts as users start them: they join a Ray that is there already."""
    return fresh_attempts


@pytest.mark.slow
def test_a_notice_brings_a_checkpoint_and_the_run_goes_on_elsewhere(attempts: Attempts) -> None:
    environment = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    cluster = subprocess.Popen(
        [
            *(sys.executable, Path(__file__).with_name("ray_nodes.py")),
            *(f"{attempts.scratch}/ray", str(DEADLINE_S)),
        ],
        env={**os.environ, **environment, "TMPDIR": str(attempts.scratch)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert cluster.stdin
    assert cluster.stdout
    address = cluster.stdout.readline().strip()
    config = ray_config(
        attempts,
        workers=1,
        train__epochs=30,
        checkpoint__every_epochs=30,
        checkpoint__every_s=None,
        faults__worker_failures=0,
    )
    environment |= {
        "RAY_ADDRESS": address,
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15",
    }
    driver = attempts.start(config, environment)
    assert wait_for(lambda: attempts.read(config, "metrics.jsonl"), 120)
    assert committed(config) == []
    print("drain", file=cluster.stdin, flush=True)
    assert wait_for(lambda: committed(config), DEADLINE_S + 10), attempts.read(
        config, "logs/attempt-1.log"
    )
    noticed = committed(config)
    assert len(noticed) == 1
    output, _ = driver.communicate()
    assert driver.returncode == 0, output

    # The same attempt has gone on, in a second group, from where the first has left. Each has two lines: at
    # its start, and after its first step.
    starts = read_records(config, "starts.jsonl")
    places = [(start["attempt"], start["group"], "startup" in start) for start in starts]
    assert places == [(1, 1, False), (1, 1, True), (1, 2, False), (1, 2, True)]
    assert starts[2]["samples"] > int(noticed[0][1:13])
    assert starts[2]["reached_step"] == starts[2]["step"]
    assert f"all is saved up to step {starts[2]['step']}" in output
    (left,) = read_records(config, "failures.jsonl")
    assert (left["attempt"], left["group"], left["rank"]) == (1, 1, None)
    assert starts[3]["startup"]["began"] == left["time"]
    assert read_json(config, "summary.json")["attempts"] == 1
    ended = [line for line in read_records(config, "metrics.jsonl") if line["kind"] == "epoch"]
    assert [line["epoch"] for line in ended] == list(range(1, 31))
    cluster.communicate("")
