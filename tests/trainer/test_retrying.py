"""The attempts of a submission on a standing RayCluster, each in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time
from trainyard_trainer.retrying import End, with_retries

def attempt():
    number = int(os.environ["TRAINYARD_ATTEMPT_OF_JOB"])
    print("attempt", number, flush=True)
    return ends[min(number, len(ends)) - 1]()

def killed():
    os.kill(os.getpid(), signal.SIGKILL)

def waits():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print("waits", os.getpid(), flush=True)
    while True:
        signal.pause()

ok, fails = (lambda: End(exit_code=0)), (lambda: End(exit_code=1))
final, wrong = (lambda: End(exit_code=1, is_final=True)), (lambda: End(exit_code=2, is_final=True))
ends = [{ends}]
sys.exit(with_retries(attempt, retries=2))
"""


def program(ends: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(ends=ends)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("ends", "attempts", "exit_code"),
    [
        ("ok", 1, 0),
        ("fails, ok", 2, 0),
        ("fails", 3, 1),
        ("killed, ok", 2, 0),
        ("killed", 3, 137),
        ("final", 1, 1),
        ("wrong", 1, 2),
        ("fails, final", 2, 1),
    ],
)
def test_attempts_follow_each_other_until_a_retry_is_of_no_use(
    ends: str, attempts: int, exit_code: int
) -> None:
    running = program(ends)
    said, _ = running.communicate(timeout=60)
    assert [
        line for line in said.splitlines() if line.startswith("attempt ") and line[8:].isdigit()
    ] == [f"attempt {number}" for number in range(1, attempts + 1)]
    assert running.returncode == exit_code


def test_a_run_that_is_asked_to_stop_is_not_started_again() -> None:
    running = program("waits")
    assert running.stdout is not None
    assert running.stdout.readline() == "attempt 1\n"
    child = int(running.stdout.readline().split()[1])
    # Ray sends the signal to all processes of a job, the oldest first.
    for process in (running.pid, child):
        subprocess.run(["kill", f"-{signal.SIGTERM}", f"{process}"], check=True)
    said, _ = running.communicate(timeout=60)
    assert said == ""
    assert running.returncode == 1
