"""The choice of a kept log: of a driver or a worker, of the newest, the previous or a given attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.errors import ConfigError
from trainyard.submission.run_folder.kept_logs import WantedLog, attempts_with_log
from trainyard_trainer.run_files.names import WorkerLogName

FILES = [
    *("logs/attempt-2.log", "logs/attempt-10.log", "logs/attempt-1.log", "run.json"),
    *(str(WorkerLogName(*parts)) for parts in ((1, 1, 3), (2, 1, 3), (2, 2, 3), (10, 1, 3))),
    *(str(WorkerLogName(10, 2, 4)), "logs/attempt-2.1/other.txt"),
]


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        (WantedLog(), "logs/attempt-10.log"),
        (WantedLog(is_previous=True), "logs/attempt-2.log"),
        (WantedLog(attempt=1), "logs/attempt-1.log"),
        (WantedLog(worker=3), "logs/attempt-10.1/worker-3.log"),
        (WantedLog(worker=3, is_previous=True), "logs/attempt-2.2/worker-3.log"),
        (WantedLog(worker=3, attempt=2), "logs/attempt-2.2/worker-3.log"),
        (WantedLog(worker=4), "logs/attempt-10.2/worker-4.log"),
    ],
    ids=str,
)
def test_a_log_is_chosen_by_numbers_and_not_by_letters(wanted: WantedLog, file: str) -> None:
    assert wanted.choose("digits", FILES) == file


@pytest.mark.parametrize(
    ("wanted", "files", "told"),
    [
        (WantedLog(attempt=7), FILES, "no log of attempt 7.*those of: 1, 2, 10"),
        (WantedLog(is_previous=True), ["logs/attempt-1.log"], "before the last.*those of: 1"),
        (WantedLog(), [], "those of: none"),
        (WantedLog(worker=4, is_previous=True), FILES, "worker 4 before the newest.*group: 10.2"),
        (WantedLog(worker=3, attempt=5), FILES, "of attempt 5.*1.1, 2.1, 2.2, 10.1"),
        (WantedLog(worker=9), FILES, "no log of worker 9.*trainyard logs digits"),
    ],
    ids=str,
)
def test_a_log_that_is_missing_is_an_error_that_names_those_that_are_there(
    wanted: WantedLog, files: list[str], told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        wanted.choose("digits", files)
    import re

    assert re.search(told, " ".join([raised.value.what, *raised.value.details]))


def test_attempts_are_in_the_order_of_their_numbers() -> None:
    assert attempts_with_log(FILES) == [1, 2, 10]


def test_a_run_on_this_machine_shows_the_logs_of_its_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainyard.__main__ import run

    for group, text in ((1, "killed\n"), (2, "alive\n")):
        file = tmp_path / "digits" / str(WorkerLogName(1, group, 1))
        file.parent.mkdir(parents=True)
        file.write_text(text)
    command = ["logs", "digits", "--storage", str(tmp_path), "--worker", "1"]
    assert run(command) == 0
    assert run([*command, "--previous"]) == 0
    assert capsys.readouterr().out == "alive\nkilled\n"
    file.write_text("one\ntwo\nthree\n")
    assert run([*command, "--tail", "2"]) == 0
    assert capsys.readouterr().out == "two\nthree\n"
    assert run([*command, "-n", "team"]) == 2
    assert "--storage and --namespace exclude each other" in capsys.readouterr().err
