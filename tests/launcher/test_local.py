"""A run on this machine, with a training program that only says what it is told to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from stand_in import stand_in_for_trainer

from trainyard.errors import ConfigError, LauncherError, RunFailed
from trainyard.local import training
from trainyard.local.tools import FOREIGN
from trainyard.local.training import error_of, local_config, train_locally
from trainyard.run_file.models import RunConfig
from trainyard.submission.status import RunStatus
from trainyard_trainer.config.variables import SecretKey

ROOT = Path(__file__).resolve().parents[2]
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
    """The file that is run in place of the trainer."""
    monkeypatch.setattr(training, "NEEDED", ())
    monkeypatch.chdir(tmp_path)
    return stand_in_for_trainer(tmp_path, monkeypatch)


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


def test_an_error_on_standard_output_is_told_if_standard_error_has_none(
    program: Path, run: RunConfig, tmp_path: Path
) -> None:
    program.write_text(
        "import sys; print('error: storage: the disk is full.\\n       Make room.'); sys.exit(1)"
    )
    assert str(refusal(run, tmp_path)).splitlines()[1:3] == [
        "       storage: the disk is full.",
        "       Make room.",
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


@pytest.mark.parametrize(
    ("ending", "explained"),
    [
        ("os.kill(os.getpid(), 9)", "the training program was ended by SIGKILL"),
        (
            "print('[2026-01-31 04:06:55,500 E 2219 2735] rpc_client.h:204: Failed to connect to GCS within "
            "60 seconds. GCS may have been killed.', file=sys.stderr); sys.exit(1)",
            "Ray's processes on this machine have ended, and the training program with them.",
        ),
    ],
)
def test_a_program_that_ends_without_an_error_of_its_own_is_explained(
    program: Path, run: RunConfig, tmp_path: Path, ending: str, explained: str
) -> None:
    program.write_text(f"import os, sys; {ending}")
    error = refusal(run, tmp_path)
    assert error.details[0].startswith(explained)
    assert "The same command goes on from the newest checkpoint." in error.details
    assert "GCS may" not in str(error)


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


def test_a_refused_start_leaves_the_log_of_the_live_run_as_it_is(
    program: Path, run: RunConfig, tmp_path: Path
) -> None:
    log = tmp_path / run.name / "ray.log"
    log.parent.mkdir()
    log.write_text("of the first\n")
    program.write_text("import sys; print('error: live', file=sys.stderr); sys.exit(1)")
    assert refusal(run, tmp_path).details == ("live",)
    assert log.read_text() == "of the first\n"


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "RANK", "WORLD_SIZE", "MASTER_ADDR"])
def test_variables_of_another_job_are_ignored_and_named(
    program: Path, run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "7")
    program.write_text(f"import os; print({name!r} in os.environ)")
    first, _, last = train_locally(local_config(run, tmp_path, 2))
    assert isinstance(first, str)
    assert first.startswith(f"{name}=7 is ignored")
    assert last == "False"


SECRETS = {"HF_TOKEN": SecretKey(name="hub", key="token")}


def test_a_secret_is_the_variable_of_its_name(
    program: Path, run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary")
    program.write_text("import os; print(os.environ['HF_TOKEN'][::-1])")
    config = local_config(run.model_copy(update={"secrets": SECRETS}), tmp_path, 2)
    assert "canary" not in config.model_dump_json()
    assert list(train_locally(config))[-1] == "yranac"


@pytest.mark.parametrize("value", [None, ""])
def test_a_run_without_its_secret_is_refused_with_the_name(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("HF_TOKEN", value)
    with pytest.raises(ConfigError, match="secrets that are not set here: HF_TOKEN"):
        local_config(run.model_copy(update={"secrets": SECRETS}), tmp_path, 2)


def test_the_guide_lists_all_ignored_variables() -> None:
    guide = (ROOT / "docs/guides/variables-and-volumes.md").read_text()
    section = guide.partition("## Variables of your shell")[2].partition("\n## ")[0]
    table = "".join(line for line in section.splitlines() if line.startswith("| "))
    assert set(re.findall("`([A-Z_]+)`", table)) == set(FOREIGN)
