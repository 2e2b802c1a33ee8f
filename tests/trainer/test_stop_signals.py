"""A signal that stops a run is not lost, whatever the process does when it comes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainyard_trainer.run_folder.stop_signals import (
    Leaving,
    StoppedBySignal,
    deferred,
    fail_on_sigterm,
    fail_on_sigusr1,
)

NUMBERS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in NUMBERS]
    fail_on_sigterm()
    fail_on_sigusr1()
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, StoppedBySignal), (signal.SIGUSR1, Leaving)]
)
def test_the_first_signal_raises_its_error_and_later_ones_do_nothing(
    number: signal.Signals, error: type[StoppedBySignal]
) -> None:
    with pytest.raises(StoppedBySignal) as raised:
        signal.raise_signal(number)
    assert type(raised.value) is error
    for later in NUMBERS:
        signal.raise_signal(later)


def test_a_program_that_is_started_after_a_signal_can_be_ended_by_one() -> None:
    with pytest.raises(StoppedBySignal):
        signal.raise_signal(signal.SIGTERM)
    assert subprocess.run(["sh", "-c", "kill $$"]).returncode == -signal.SIGTERM


def test_a_deferred_block_runs_to_its_end_before_the_error_is_raised() -> None:
    steps = []

    def work() -> None:
        with deferred():
            signal.raise_signal(signal.SIGTERM)
            steps.append("end")

    with pytest.raises(StoppedBySignal):
        work()
    assert steps == ["end"]


def test_an_error_of_a_deferred_block_is_the_context_of_the_stop() -> None:
    def fail() -> None:
        with deferred():
            signal.raise_signal(signal.SIGTERM)
            raise OSError("it did not start")

    with pytest.raises(StoppedBySignal) as raised:
        fail()
    assert str(raised.value.__context__) == "it did not start"


@pytest.mark.parametrize("moment", ["before", "after_in_parent"])
def test_a_signal_that_comes_in_the_middle_of_a_fork_is_raised_and_leaves_no_lock_held(
    moment: str,
) -> None:
    coming = [signal.SIGTERM]

    def send() -> None:
        if coming:
            os.kill(os.getpid(), coming.pop())

    os.register_at_fork(**{moment: send})
    with pytest.raises(StoppedBySignal), deferred():
        # With a `preexec_fn`, Python forks with its functions before and after it, as Ray does.
        subprocess.run(["true"], preexec_fn=lambda: None, check=True)
    assert not coming
    with ThreadPoolExecutor(1) as other:
        assert other.submit(logging._lock.acquire, False).result()  # type: ignore[attr-defined]
        other.submit(logging._lock.release).result()  # type: ignore[attr-defined]
