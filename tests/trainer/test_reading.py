"""What a task of the Ray loader reads, and what a cancelled task leaves."""

from __future__ import annotations

import signal
import sys
import threading
from importlib import import_module
from pathlib import Path

import pytest

from trainyard_trainer.data.loading.reading import import_whole

MODULE = """
import signal
from threading import main_thread
signal.pthread_kill(main_thread().ident, signal.SIGUSR1)
import test_reading_cancelled
test_reading_cancelled.CANCELLED.wait()
whole = True
"""


class Cancelled(Exception):
    """Ray's exception in the main thread of a cancelled task."""


def test_a_task_that_is_cancelled_while_it_imports_leaves_a_whole_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = threading.Event()

    def cancel(*_: object) -> None:
        cancelled.set()
        raise Cancelled

    gate = type(sys)("test_reading_cancelled")
    monkeypatch.setattr(gate, "CANCELLED", cancelled, raising=False)
    monkeypatch.setitem(sys.modules, gate.__name__, gate)
    (tmp_path / "imported_by_a_task.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.signal(signal.SIGUSR1, cancel)
    try:
        with pytest.raises(Cancelled):
            import_whole("imported_by_a_task")
    finally:
        signal.signal(signal.SIGUSR1, before)
    # Python's import lock waits for the thread, if the exception came before it was waited for.
    assert import_module("imported_by_a_task").whole
    del sys.modules["imported_by_a_task"]
