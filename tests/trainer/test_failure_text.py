"""The error of the user's code, found in the output of its program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainyard_trainer.user_code.failure_text import describe

GROUP = "raise ExceptionGroup('two', [ValueError('first'), TypeError('second')])"


@pytest.mark.parametrize(
    ("program", "error"),
    [
        (
            "def load():\n    raise ValueError('no rows')\nload()",
            "ValueError: no rows ({file}:2 in load)",
        ),
        ("import json\njson.loads('{')", "json.decoder.JSONDecodeError: Expecting property name"),
        ("raise SystemExit('no data: give a folder')", "no data: give a folder"),
        (
            "import missing_module",
            "ModuleNotFoundError: No module named 'missing_module' ({file}:1",
        ),
        (
            "def load():\n    class E(Exception): pass\n    raise E('no rows')\nload()",
            "load.<locals>.E: no rows ({file}:3 in load)",
        ),
        ("x = (", "SyntaxError: '(' was never closed ({file}:1)"),
        (
            "try:\n    1 / 0\nexcept Exception as e:\n    raise OSError('on top') from e",
            "OSError: on top",
        ),
        pytest.param(
            *(GROUP, "TypeError: second ({file}:1"),
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="needs Python 3.11"),
        ),
    ],
)
def test_the_last_own_frame_and_the_error_are_named(
    tmp_path: Path, program: str, error: str
) -> None:
    file = tmp_path / "train.py"
    file.write_text(program)
    ended = subprocess.run([sys.executable, file], capture_output=True, text=True)
    assert describe(ended.stderr.splitlines()).startswith(error.format(file=file))


def traceback(
    rank: int, error: str, prefix: str = "(TorchrunActor pid=7, ip=10.0.0.1) "
) -> list[str]:
    lines = [
        "Traceback (most recent call last):",
        '  File "/code/train.py", line 3, in main',
        error,
    ]
    return [f"{prefix}[rank{rank}]: {line}" for line in lines]


def test_the_worker_that_has_failed_first_is_named_not_those_that_have_lost_it() -> None:
    lines = [
        *traceback(1, "ValueError: bad"),
        *traceback(0, "RuntimeError: Connection closed by peer"),
    ]
    assert describe(lines) == "worker 1: ValueError: bad (/code/train.py:3 in main)"


@pytest.mark.parametrize(
    "folder",
    [
        "/tmp/trainyard-6lnhjv1t/ray/session_2026-11-25_19-36-19_129765_31881/runtime_resources"
        "/working_dir_files/_ray_pkg_fe171d53a5d8c915/",
        "/tmp/trainyard-6lnhjv1t/tmp1smc2562/",
    ],
)
def test_a_file_of_the_runs_code_is_named_as_in_the_users_folder(folder: str) -> None:
    lines = [
        "Traceback (most recent call last):",
        f'  File "{folder}models/steps.py", line 3, in one_step',
        "ValueError: the label 'cat' is unknown",
    ]
    assert (
        describe(lines) == "ValueError: the label 'cat' is unknown (models/steps.py:3 in one_step)"
    )


def test_lines_of_two_workers_may_be_mixed() -> None:
    one, other = (
        traceback(0, "ValueError: one"),
        traceback(1, "RuntimeError: Connection reset by peer"),
    )
    mixed = [line for pair in zip(one, other, strict=True) for line in pair]
    assert describe(mixed) == "worker 0: ValueError: one (/code/train.py:3 in main)"


def test_a_worker_of_torchrun_that_was_killed_is_named_with_its_signal() -> None:
    lines = [
        *("Root Cause (first observed failure):", "[0]:", "  rank      : 1 (local_rank: 1)"),
        *("  exitcode  : -9 (pid: 8)", "  traceback : Signal 9 (SIGKILL) received by PID 8"),
    ]
    assert describe(lines) == "worker 1 was killed by SIGKILL"


def test_output_without_an_error_is_described_by_its_last_line() -> None:
    assert describe(["epoch 1", "out of tokens", ""]) == "out of tokens"
    assert describe([]) == ""
