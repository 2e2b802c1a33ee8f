"""An error that a retry cannot cure is recorded, and the retries of the same submission repeat it at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from attempts import Attempts, lines, read_json
from training import small_config

from trainyard_trainer.config.trainer_config import CommandConfig
from trainyard_trainer.errors import ConfigError, Diverged, RunError, UserCodeFailed
from trainyard_trainer.run_folder import final_failure
from trainyard_trainer.run_folder.final_failure import RepeatedFailure, raise_again, record
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.user_code.failure_text import FailureText

HEAD = {"RAY_CLUSTER_NAME": "digits-1a2b3c4d-x7k2p"}
RETRY = {"RAY_CLUSTER_NAME": "digits-1a2b3c4d-9zzzz"}
OTHER_SUBMISSION = {"RAY_CLUSTER_NAME": "digits-5e6f7a8b-x7k2p"}
RECORD = "final-failure.json"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.open(str(tmp_path), "digits")


def failed(folder: RunFolder, retries: int = 2) -> None:
    record(folder, 1, Diverged("the loss became NaN"), retries, HEAD)


def is_tried(folder: RunFolder, environment: dict[str, str]) -> bool:
    try:
        raise_again(folder, environment)
    except RepeatedFailure:
        return False
    return True


def test_each_retry_repeats_the_first_error_with_its_exit_code(folder: RunFolder) -> None:
    record(folder, 1, ConfigError("there is no data"), 2, HEAD)
    with pytest.raises(RepeatedFailure, match=r"^there is no data\n") as raised:
        raise_again(folder, RETRY)
    assert raised.value.exit_code == ConfigError.exit_code
    assert raised.value.is_final


def test_after_the_last_retry_the_same_submission_is_tried_again(folder: RunFolder) -> None:
    failed(folder, retries=2)
    assert [is_tried(folder, RETRY) for _ in range(3)] == [False, False, True]


def test_another_submission_is_tried(folder: RunFolder) -> None:
    failed(folder)
    assert is_tried(folder, OTHER_SUBMISSION)
    assert is_tried(folder, RETRY), "the record is gone"


def test_a_record_of_long_ago_is_ignored(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_failure, "VALID_S", 0.0)
    failed(folder)
    assert is_tried(folder, RETRY)


def test_a_withdrawn_record_is_ignored(folder: RunFolder) -> None:
    failed(folder)
    folder.write(f"{folder.root}/{RECORD}", "{}")
    assert is_tried(folder, RETRY)


@pytest.mark.parametrize(
    ("error", "retries", "environment"),
    [
        pytest.param(RunError("a node is gone"), 2, HEAD, id="a retry may cure it"),
        pytest.param(Diverged("NaN"), 0, HEAD, id="no retries"),
        pytest.param(Diverged("NaN"), 2, {}, id="no RayJob"),
    ],
)
def test_nothing_is_recorded(
    folder: RunFolder, error: RunError, retries: int, environment: dict[str, str]
) -> None:
    record(folder, 1, error, retries, environment)
    assert not folder.exists(f"{folder.root}/{RECORD}")


@pytest.mark.parametrize(
    ("last_line", "is_final"),
    [
        ("ModuleNotFoundError: No module named 'peft'", True),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/trian'", True),
        ("huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error", True),
        ("OSError: gtp2 is not a local folder and is not a valid model identifier", True),
        ("SyntaxError: invalid syntax", True),
        ("ConnectionError: the hub does not answer", False),
        ("torch.distributed.DistNetworkError: the client socket has timed out", False),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_errors_of_the_users_code_that_a_retry_cannot_cure(last_line: str, is_final: bool) -> None:
    text = FailureText()
    read = text.reading(lambda line: None)
    for line in ("Traceback (most recent call last):", '  File "/code/a.py", line 3', last_line):
        read(line)
    assert text.is_final is is_final


@pytest.mark.ci
def test_an_attempt_tells_the_launcher_and_its_retry_ends_before_it_starts_anything(
    attempts: Attempts,
) -> None:
    config = small_config(attempts.storage, data__source="/there/is/no/data")
    first = attempts.finish(config, 2, HEAD, ["--without-ray"])
    assert lines(first, "final failure") == [{"exit_code": 2}]
    summary = read_json(config, "summary.json")
    again = attempts.finish(config, 2, RETRY, ["--without-ray"])
    assert "error: " + summary["error"] in again
    assert "Attempt 1 failed with this error" in again
    assert read_json(config, "summary.json") == summary
    assert not (attempts.storage / config.name / "logs/attempt-2.log").exists()


@pytest.mark.ci
def test_a_missing_module_of_the_users_code_is_not_tried_again(attempts: Attempts) -> None:
    config = CommandConfig.model_validate(
        {
            "name": "own",
            "command": ["python", "-c", "import missing_module"],
            "scaling": {"num_workers": 1, "use_gpu": False, "cpus_per_worker": 1},
            "storage": {"path": str(attempts.storage)},
        }
    )
    output = attempts.finish(config, 1, HEAD)
    assert "ModuleNotFoundError: No module named 'missing_module'" in output
    assert read_json(config, RECORD)["submission"] == "digits-1a2b3c4d"


def test_the_error_class_of_user_code_says_whether_it_is_final() -> None:
    assert UserCodeFailed("x", is_final=True).is_final
    assert not UserCodeFailed("x", is_final=False).is_final
