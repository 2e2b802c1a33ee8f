"""A run on this machine, with a training program that only says what it is told to."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.errors import ConfigError, LauncherError, RunFailed
from trainyard.local import training
from trainyard.local.training import error_of, local_config, train_locally
from trainyard.run_file.models import RunConfig
from trainyard.submission.status import RunStatus

ASKED_TO_LEAVE = """
import pathlib, signal, sys, time
def leave(*_):
    pathlib.Path(sys.argv[0]).with_name("left").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, leave)
print("hello", flush=True)
time.sleep(60)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that `python -m trainyard_trainer` runs."""
    monkeypatch.setattr(training, "NEEDED", ())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "trainyard_trainer"
    package.mkdir()
    (package / "__init__.py").touch()
    return package / "__main__.py"


def refusal(run: RunConfig, storage: Path) -> LauncherError:
    with pytest.raises(LauncherError) as raised:
        list(train_locally(local_config(run, storage, 2)))
    return raised.value


def test_words_progress_and_summary_are_told_apart(
    program: Path, run: RunConfig, tmp_path: Path
) -> None:
    program.write_text(
        "print('hello'); print('progress {\"percent\": 5}'); print('summary {\"outcome\": \"succeeded\"}')"
    )
    assert list(train_locally(local_config(run, tmp_path, 2))) == [
        RunStatus(submission="digits", phase="starting"),
        "hello",
        RunStatus(submission="digits", phase="running", progress={"percent": 5}),
        RunStatus(submission="digits", phase="succeeded", summary={"outcome": "succeeded"}),
    ]


@pytest.mark.parametrize(("code", "kind"), [(2, ConfigError), (1, RunFailed)])
def test_the_programs_whole_error_is_told(
    program: Path, run: RunConfig, tmp_path: Path, code: int, kind: type[LauncherError]
) -> None:
    program.write_text(
        f"import sys; print('noise\\nerror: what\\n       remedy', file=sys.stderr); sys.exit({code})"
    )
    error = refusal(run, tmp_path)
    assert type(error) is kind
    assert error.details[:2] == ("what", "remedy")


def test_an_error_ends_where_its_indented_lines_end() -> None:
    assert error_of("error: a\n       b\nnoise\n") == ["a", "b"]
    assert error_of("noise\nlast\n") == ["last"]
    assert error_of("") == []


def test_a_storage_that_cannot_be_used_is_named(
    program: Path, run: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    error = refusal(run, tmp_path / "file")
    assert error.exit_code == 2
    assert f"the storage {tmp_path}/file cannot be used" in error.what
    assert "--storage" in error.details[0]


def test_whoever_stops_looking_ends_the_program(
    program: Path, run: RunConfig, tmp_path: Path
) -> None:
    program.write_text(ASKED_TO_LEAVE)
    statuses = train_locally(local_config(run, tmp_path, 2))
    assert isinstance(next(statuses), RunStatus)
    assert next(statuses) == "hello"
    statuses.close()
    assert program.with_name("left").exists()
