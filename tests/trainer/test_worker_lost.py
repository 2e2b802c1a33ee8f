"""Workers that die or hang while others wait for them: the run goes on, and what happened is put down."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from attempts import (
    Attempts,
    check_metrics,
    ray_config,
    read_json,
    read_records,
    reading,
    wait_for,
)

from trainyard_trainer.run_folder.measurements.progress import loop_s

EPOCHS = 20
TIMEOUT_S = 6.0


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_worker_that_dies_or_hangs_is_replaced_and_it_is_written_down_when_that_was_noticed(
    attempts: Attempts, how: signal.Signals
) -> None:
    config = ray_config(
        attempts,
        train__epochs=EPOCHS,
        checkpoint__every_s=2.0,
        checkpoint__every_epochs=EPOCHS,
        faults__collective_timeout_s=TIMEOUT_S,
    )
    driver = attempts.start(config)
    assert wait_for(lambda: attempts.read(config, "metrics.jsonl"), 120)
    (_, last) = read_json(config, "workers.json")["workers"]
    os.kill(last["process"], how)
    output, _ = driver.communicate()
    assert driver.returncode == 0, output

    failed = read_records(config, "failures.jsonl")
    assert {(each["attempt"], each["group"]) for each in failed} == {(1, 1)}
    assert "of group 1 failed: " in output
    _, second = (each for each in read_records(config, "starts.jsonl") if "startup" in each)
    assert second["startup"]["began"] == failed[0]["time"]
    assert list(second["startup"]) == ["began", "workers", "model", "first_batch", "first_step"]
    assert second["reached_step"] >= second["step"]
    summary = read_json(config, "summary.json")
    assert summary["attempts"] == 1
    goodput = summary["goodput"]
    (attempt,) = read_records(config, "attempts.jsonl")
    held_s = summary["record"][0]["counted_until"] - attempt["began"] + attempt["imports_s"]
    parts = ("steps", "data", "validation", "checkpoint", "starts", "again", "unnoticed", "ends")
    assert sum(goodput[f"{part}_s"] for part in parts) == pytest.approx(goodput["total_s"])
    assert goodput["total_s"] == pytest.approx(2 * held_s, abs=0.1)
    # The steps that came after the checkpoint, and the time in which nobody knew of the fault.
    lost_s = second["reached_loop_s"] - loop_s(second["seconds"])
    assert goodput["again_s"] == pytest.approx(2 * lost_s, abs=0.1)
    silent_s = TIMEOUT_S if how == signal.SIGSTOP else 0.0
    assert goodput["unnoticed_s"] > 2 * silent_s
    check_metrics(config, EPOCHS)
    # The one that hung does not stay behind.
    assert not Path(f"/proc/{last['process']}").exists()


@pytest.mark.slow
def test_a_worker_that_is_replaced_alone_costs_only_the_time_of_its_replacement(
    attempts: Attempts,
) -> None:
    config = ray_config(attempts, train__epochs=EPOCHS, faults__replace_workers=True)
    driver = attempts.start(config)
    with reading(driver) as output:
        assert wait_for(lambda: attempts.read(config, "metrics.jsonl"), 200), output
        first, _ = read_json(config, "workers.json")["workers"]
        os.kill(first["process"], signal.SIGKILL)
        assert driver.wait() == 0, output
    assert sum("worker 0 replaced within" in line for line in output) == 1
    (failed,) = read_records(config, "failures.jsonl")
    (replaced,) = read_records(config, "replacements.jsonl")
    assert (failed["rank"], replaced["ranks"]) == (0, [0])
    goodput = read_json(config, "summary.json")["goodput"]
    assert goodput["starts"]["replacements"] == pytest.approx(2 * replaced["seconds"], abs=0.1)
    assert goodput["again_s"] == 0
    log = attempts.read(config, "logs/attempt-1.1/worker-0.log")
    assert "worker 0 replaced within" in log
    check_metrics(config, EPOCHS)


@pytest.mark.slow
def test_all_workers_restart_if_a_replacement_does_not_start_in_time(attempts: Attempts) -> None:
    config = ray_config(
        attempts,
        train__epochs=EPOCHS,
        faults__replace_workers=True,
        faults__replacement_timeout_s=20.0,
    )
    driver = attempts.start(config)
    with reading(driver) as output:
        assert wait_for(lambda: attempts.read(config, "metrics.jsonl"), 200), output
        (server,) = attempts.processes("fork_server.py")
        os.kill(server, signal.SIGSTOP)
        _, last = read_json(config, "workers.json")["workers"]
        os.kill(last["process"], signal.SIGKILL)
        late = "a replacement has not started within 20 s: all workers are restarted"
        assert wait_for(lambda: any(late in line for line in output), 120), output
        os.kill(server, signal.SIGCONT)
        assert driver.wait() == 0, output
    assert {each["group"] for each in read_records(config, "starts.jsonl")} == {1, 2}
    check_metrics(config, EPOCHS)


@pytest.mark.slow
def test_workers_that_are_lost_too_often_end_the_run(attempts: Attempts) -> None:
    config = ray_config(
        attempts, train__epochs=200, faults__replace_workers=True, faults__worker_failures=0
    )
    driver = attempts.start(config)
    with reading(driver) as output:
        assert wait_for(lambda: attempts.read(config, "metrics.jsonl"), 200), output
        _, last = read_json(config, "workers.json")["workers"]
        os.kill(last["process"], signal.SIGKILL)
        assert driver.wait() == 1
    assert "worker 1 failed, after 0 restarts" in "".join(output)
