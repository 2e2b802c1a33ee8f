"""A terminal debugs a worker between its steps, and the worker trains on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attempts import Attempts, read_json, wait_for
from training import small_config

from trainyard_trainer.engine import debugging
from trainyard_trainer.engine.debugging import BUSY, LEFT, DebuggedBatches, Debugger
from trainyard_trainer.parallel.activity import Activity
from trainyard_trainer.run_files.exit_codes import SUCCEEDED, WRONG_INPUT
from trainyard_trainer.run_files.unix_sockets import debugger_socket

LIMIT_S = 60.0


def attach(stdin: str, process: int = os.getpid()) -> subprocess.CompletedProcess[str]:
    """Run the terminal's end of the connection until it is closed."""
    return subprocess.run(
        [sys.executable, "-m", "trainyard_trainer.tools.attach", str(process)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


class Training:
    """Makes the steps of a worker in this thread, until what another thread does has ended."""

    def __init__(self) -> None:
        self.steps = 0
        self.debugger = Debugger(self.loss, 900.0, Activity())
        self.is_over = threading.Event()

    def loss(self, batch: Any) -> int:
        doubled = 2 * batch
        return self.noted(doubled)

    def noted(self, loss: int) -> int:
        self.steps += 1
        return loss

    def epoch(self, epoch: int) -> Iterator[Any]:
        while not self.is_over.wait(0.001):
            yield 21

    def state(self) -> dict[str, torch.Tensor]:
        return {}

    def beside(self, work: Callable[[], Any]) -> Any:
        """Train while `work` is done in another thread, and return its result."""
        found = []

        def do() -> None:
            try:
                found.append(work())
            finally:
                self.is_over.set()

        thread = threading.Thread(target=do)
        with self.debugger.listening():
            thread.start()
            for batch in DebuggedBatches(self, self.debugger).epoch(0):
                self.loss(batch)
        thread.join()
        assert sys.gettrace() is None
        return found[0]


@pytest.mark.parametrize("end", ["q\n", "c\n", "exit\n", ""])
def test_a_terminal_stops_at_the_loss_and_the_worker_trains_on_when_it_leaves(end: str) -> None:
    training = Training()
    ended = training.beside(lambda: attach(f"p batch\n{end}"))
    assert ended.returncode == SUCCEEDED, ended.stderr
    assert "stops at the first line of Training.loss" in ended.stdout
    assert "-> doubled = 2 * batch" in ended.stdout
    assert "(Pdb) 21" in ended.stdout
    assert ended.stdout.endswith(LEFT)
    assert training.steps > 1


def test_breakpoints_and_statements_work_and_the_values_that_they_set_are_used() -> None:
    training = Training()
    line = Training.noted.__code__.co_firstlineno + 1
    ended = training.beside(
        lambda: attach(f"b {__file__}:{line}\nc\np loss\n!loss = 5\nc\np self.steps\nq\n")
    )
    assert "(Pdb) 42" in ended.stdout
    assert ended.stdout.endswith(LEFT)


def test_a_second_terminal_is_refused_and_a_later_one_is_not() -> None:
    training = Training()

    def debug() -> tuple[str, str]:
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(debugger_socket(os.getpid()))
            assert first.recv(1)
            refused = attach("q\n").stdout
        assert wait_for(lambda: BUSY not in (later := attach("q\n").stdout) and later, LIMIT_S)
        return refused

    assert training.beside(debug) == BUSY


@pytest.mark.parametrize("command", ["run", "restart", "interact"])
def test_what_would_end_the_worker_or_read_its_input_is_refused(command: str) -> None:
    ended = Training().beside(lambda: attach(f"{command}\np 6 * 7\n"))
    assert "*** " in ended.stdout
    assert "(Pdb) 42" in ended.stdout


def test_a_worker_that_makes_no_step_shows_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debugging, "STACKS_S", 0.1)
    debugger = Debugger(Training.loss, 900.0, Activity())
    with debugger.listening(), socket.socket(socket.AF_UNIX) as terminal:
        terminal.connect(debugger_socket(os.getpid()))
        shown = ""
        while "test_a_worker_that_makes_no_step_shows_where_it_is" not in shown:
            piece = terminal.recv(4096)
            assert piece, shown
            shown += piece.decode()
    assert "No step has begun for 0.1 s" in shown


def test_a_terminal_that_left_a_worker_without_steps_makes_room_for_the_next() -> None:
    debugger = Debugger(Training.loss, 900.0, Activity())

    def greeting() -> str:
        with socket.socket(socket.AF_UNIX) as terminal:
            terminal.connect(debugger_socket(os.getpid()))
            return terminal.recv(4096).decode()

    with debugger.listening():
        assert greeting().startswith("The next step stops")
        assert wait_for(lambda: greeting() != BUSY, LIMIT_S)


def test_a_function_without_lines_stops_at_the_next_line() -> None:
    training = Training()
    training.debugger = Debugger(len, 900.0, Activity())
    assert "(Pdb) 42" in training.beside(lambda: attach("p 6 * 7\nq\n")).stdout


def test_a_process_that_is_no_worker_is_named() -> None:
    ended = attach("", process=1)
    assert ended.returncode == WRONG_INPUT
    assert ended.stderr.startswith("error: process 1 waits for no debugger: ")


@pytest.mark.ci
def test_a_run_that_was_debugged_goes_on_to_its_end(attempts: Attempts) -> None:
    config = small_config(attempts.storage, train__epochs=20)
    driver = attempts.start(config, arguments=["--without-ray"])
    assert wait_for(lambda: attempts.read(config, "metrics.jsonl"), LIMIT_S)
    (worker,) = read_json(config, "workers.json")["workers"]
    ended = attach("p type(batch).__name__\nq\n", process=worker["process"])
    assert "(Pdb) 'Batch'" in ended.stdout
    output, _ = driver.communicate()
    assert driver.returncode == 0, output
    assert read_json(config, "summary.json")["epochs"] == 20
