"""Two runs side by side, from what lies in their folders."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trainyard.cli.commands.this_machine.compare import COMPARED, compare
from trainyard.errors import ConfigError as LauncherConfigError
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.tools import compare as command
from trainyard_trainer.tools import run_comparison

PNG = b"\x89PNG\r\n\x1a\n"

Record = dict[str, Any]

CONFIG: Record = {
    "name": "one",
    "data": {"source": "digits", "augment": {"flip": False, "crop": 0}},
    "train": {"seed": 0, "optimizer": {"name": "sgd", "momentum": 0.9}, "early_stopping": None},
    "scaling": {"num_workers": 2, "use_gpu": False},
}
SECONDS = {
    "startup": 5.0, "data": 1.0, "compute": 8.0, "communication": 1.0, "checkpoint": 0.5, "validation": 2.0,
}  # fmt: skip
SUMMARY: Record = {
    "outcome": "succeeded", "error": None, "epochs": 2, "stopped_early": False, "best_epoch": 2, "steps": 20,
    "samples_seen": 200, "samples_per_s": 20.0, "train_s": 12.5, "seconds": SECONDS, "workers": 2,
}  # fmt: skip
VERSIONS = {"python": "3.11.7", "torch": "2.13.0"}
ATTEMPT: Record = {"attempt": 1, "workers": 2, "versions": VERSIONS}


def epoch(number: int, loss: float, accuracy: float) -> Record:
    return {
        "kind": "epoch", "step": 10 * number, "samples": 100 * number, "loss": loss, "accuracy": accuracy,
        "val_loss": loss, "val_accuracy": accuracy, "data_wait_s": None, "step_s": None,
        "memory_bytes": 3 * 2**20,
    }  # fmt: skip


def interval(step: int, step_s: float, wait_s: float) -> Record:
    return {
        "kind": "interval", "step": step, "samples": 10 * step, "loss": 1.0, "accuracy": 0.5,
        "data_wait_s": wait_s, "step_s": step_s, "memory_bytes": 2**20,
    }  # fmt: skip


EPOCHS = (epoch(1, 0.5, 0.9), epoch(2, 0.25, 0.8))


def lines(records: Sequence[Record]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def write(folder: RunFolder, **files: Any) -> None:
    """A run that has ended well, with some of its files as said; None for one that is not there."""
    whole: Record = {
        "run": CONFIG, "summary": SUMMARY, "metrics": EPOCHS, "attempts": [ATTEMPT],
        "starts": [{"attempt": 1, "group": 1, "step": 0, "reached_step": 0}],
        "failures": None, "progress": None, "submission": None,
    }  # fmt: skip
    for name, content in (whole | files).items():
        if isinstance(content, dict):
            folder.write(f"{folder.root}/{name}.json", json.dumps(content))
        elif content is not None:
            folder.write(f"{folder.root}/{name}.jsonl", lines(content))


NODE: Record = {
    "name": "pod-a",
    "id": "1",
    "gpus": [{"model": "H100", "id": "GPU-1"}],
    "gpu_driver": "550",
}
RECORD: Record = {
    "attempt": 1, "image_digests": ["sha256:1"], "git": {"revision": "1" * 40, "is_dirty": True},
    "code_sha256": None, "nodes": [NODE], "gpu_hours": 1.5, "cpu_hours": 12.0,
    "versions": {"nvidia-nccl-cu13": "2.28"},
}  # fmt: skip


def own(**changes: Any) -> Record:
    """The files of a run with code of its own."""
    summary = {"outcome": "succeeded", "error": None, "workers": 2, "run_s": 30.0, "metrics": {}}
    config = {"name": "two", "command": ["python", "x.py"], "scaling": {"num_workers": 2}}
    reports = [{"attempt": 1, "reports": n, "metrics": {"error": 1.0 / n}} for n in (1, 2)]
    return {"run": config, "summary": summary, "metrics": reports, "starts": None} | changes


def compared(
    storage: Path, capsys: pytest.CaptureFixture[str], *options: str, names: Sequence[str] = ()
) -> Record:
    arguments = [*(names or ("one", "two")), "--storage", str(storage), "--json", *options]
    assert command.main(arguments) == 0
    document: Record = json.loads(capsys.readouterr().out)
    return document


@pytest.fixture
def one(tmp_path: Path) -> RunFolder:
    folder = RunFolder.open(str(tmp_path), "one")
    write(folder)
    return folder


@pytest.fixture
def two(one: RunFolder) -> RunFolder:
    return one.sibling("two")


def test_fields_that_differ_are_told_and_equal_ones_are_counted(
    two: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopping = {"metric": "val_loss"}
    train = CONFIG["train"] | {"seed": 1, "optimizer": {"name": "adamw"}}
    write(two, run=CONFIG | {"name": "two", "train": train | {"early_stopping": stopping}})
    assert compared(tmp_path, capsys)["config"] == {
        "equal": 5,
        "differ": [
            {"field": "train.early_stopping.metric", "a": None, "b": "val_loss"},
            {"field": "train.optimizer.momentum", "a": 0.9, "b": None},
            {"field": "train.optimizer.name", "a": "sgd", "b": "adamw"},
            {"field": "train.seed", "a": 0, "b": 1},
        ],
    }


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ({}, {}, [("x", {}, {})]),
        (None, None, [("x", None, None)]),
        ({}, None, [("x", {}, None)]),
        ({"k": 1}, None, [("x.k", 1, None)]),
        ({"k": 1}, 2, [("x", {"k": 1}, 2), ("x.k", 1, None)]),
        ([1], [1, 2], [("x", [1], [1, 2])]),
    ],
)
def test_leaves_are_found_whatever_the_other_side_is(a: Any, b: Any, found: list[Any]) -> None:
    assert list(run_comparison.leaves(a, b, "x")) == found


def test_results_speed_workers_and_environment_are_those_of_the_records(
    two: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    starts = [
        {"attempt": 1, "group": 1, "step": 0, "reached_step": 0},
        {"attempt": 1, "group": 1, "step": 0, "reached_step": 0, "startup": {}},
        {"attempt": 1, "group": 2, "step": 4, "reached_step": 7},
        {"attempt": 2, "group": 1, "step": 9, "reached_step": 9},
    ]
    failures = [{"rank": 0, "error": "x"}, {"rank": 1, "error": "y"}, {"rank": None, "error": None}]
    later = ATTEMPT | {"attempt": 2, "versions": VERSIONS | {"torch": "2.14.0"}}
    submission = {"launch": {"image": "mine:2"}}
    attempts = [ATTEMPT, later]
    write(two, starts=starts, failures=failures, attempts=attempts, submission=submission)
    first, second = compared(tmp_path, capsys)["runs"]
    assert first["notes"] == second["notes"] == []
    assert second["metrics"]["val_accuracy"] == {"last": 0.8, "lowest": 0.8, "highest": 0.9}
    assert second["result"]["samples"] == 200
    assert second["speed"]["samples/s"] == 20.0
    assert second["speed"]["a step, s"] == 0.5
    assert second["speed"]["data wait of a step, s"] == 0.05
    assert second["speed"]["start-up in all, s"] == 5.0
    assert first["workers"] == {
        "workers": 2, "attempts": 1, "worker groups": 1, "worker failures": 0, "nodes left": 0,
        "steps made again": 0,
    }  # fmt: skip
    assert second["workers"] == {
        "workers": 2, "attempts": 2, "worker groups": 3, "worker failures": 2, "nodes left": 1,
        "steps made again": 3,
    }  # fmt: skip
    assert second["environment"] == {
        "python": "3.11.7",
        "torch": "2.13.0, 2.14.0",
        "image": "mine:2",
        "memory of a worker (rank 0), MiB": 3.0,
    }


def test_a_run_that_goes_on_is_compared_by_its_metrics(
    two: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = [interval(2, 0.4, 0.1), interval(8, 0.2, 0.1)]
    progress = {"percent": 40.0, "step": 8, "samples": 80, "samples_per_s": 30.0, "workers": 4}
    write(two, summary=None, progress=progress, metrics=metrics)
    found = compared(tmp_path, capsys)["runs"][1]
    assert found["notes"] == ["it has not ended (40 %): what is known at the end is missing"]
    assert found["result"]["steps"] == 8
    assert found["speed"]["samples/s"] == 30.0
    assert found["speed"]["a step, s"] == pytest.approx((2 * 0.5 + 6 * 0.3) / 8)
    assert found["speed"]["data wait of a step, s"] == pytest.approx(0.1)
    assert found["speed"]["training in all, s"] is None
    assert found["metrics"]["loss"]["last"] == 1.0
    assert found["workers"]["workers"] == 4


@pytest.mark.parametrize(
    ("files", "notes"),
    [
        (own(), []),
        (own(metrics=None), ["it has code of its own, which has reported no metrics"]),
        ({"summary": SUMMARY | {"outcome": "failed", "error": "no room"}}, ["it failed: no room"]),
        ({"summary": SUMMARY | {"outcome": "stopped", "error": "SIGTERM"}}, ["it was stopped: SIGTERM"]),
        ({"run": None, "summary": None}, ["it has not begun"]),
        (dict.fromkeys(("run", "summary", "metrics", "attempts", "starts")), ["there is no such run"]),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_said_and_the_rest_is_compared(
    two: RunFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    files: Record,
    notes: list[str],
) -> None:
    write(two, **files)
    assert compared(tmp_path, capsys)["runs"][1]["notes"] == notes
    assert command.main(["one", "two", "--storage", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.err == "".join(f"two: {note}\n" for note in notes)
    assert re.search(r"val_accuracy, highest +0\.9", printed.out)


def test_reported_metrics_are_compared_by_name(
    one: RunFolder, two: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = [
        {"attempt": 1, "reports": 1, "metrics": {"error": 3, "word": "x", "is": True}},
        {"attempt": 2, "reports": 1, "metrics": {"error": 2, "bleu": 0.5}},
    ]
    write(one, **own())
    write(two, **own(metrics=reports))
    first, second = compared(tmp_path, capsys)["runs"]
    assert first["metrics"] == {"error": {"last": 0.5, "lowest": 0.5, "highest": 1.0}}
    assert second["metrics"] == {
        "error": {"last": 2, "lowest": 2, "highest": 3},
        "bleu": {"last": 0.5, "lowest": 0.5, "highest": 0.5},
    }
    assert second["result"] == {"outcome": "succeeded", "reports": 2}


def test_the_tables_stand_under_each_other(
    two: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(two, summary=SUMMARY | {"samples_per_s": 40.0}, run=CONFIG | {"scaling": {"x": 900.0}})
    assert command.main(["one", "two", "--storage", str(tmp_path)]) == 0
    blocks = capsys.readouterr().out.split("\n\n")
    assert blocks[0] == "config: 3 of 10 fields differ"
    assert blocks[1].splitlines()[-1].split() == ["scaling.x", "-", "900.0"]
    assert [block.split()[0] for block in blocks[1:]] == ["field", *run_comparison.HEADINGS]
    speed = next(block for block in blocks if block.startswith("speed")).splitlines()
    assert speed[0].split() == ["speed", "one", "two", "ratio"]
    assert speed[1].split() == ["samples/s", "20", "40", "2.00"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (True, "yes"), (False, "no"), (12345, "12,345"), (1234.56, "1,234.6"),
        (0.123456, "0.1235"), (1e-9, "1e-09"), ("x", "x"), ([1], "[1]"),
    ],
)  # fmt: skip
def test_values_have_as_many_digits_as_a_person_compares(value: Any, text: str) -> None:
    assert command.shown(value) == text


def test_runs_of_one_name_are_called_by_their_folders(
    one: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(RunFolder.open(f"{tmp_path}/other", "one"))
    runs = compared(tmp_path, capsys, names=("one", f"{tmp_path}/other/one"))["runs"]
    assert [run["name"] for run in runs] == [f"{tmp_path}/one", f"{tmp_path}/other/one"]


def test_two_runs_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no runs .*/one and .*/two\.\n.*--storage DIR"):
        command.main(["one", "two", "--storage", str(tmp_path)])


def test_runs_on_every_storage_are_compared(
    storage: tuple[str, str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    path, endpoint = storage
    for name in ("one", "two"):
        write(RunFolder.open(path, name, endpoint), run=CONFIG | {"name": name})
    options = ["--storage", path, *(["--endpoint", endpoint] if endpoint else [])]
    assert command.main(["one", "two", "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"] == {"equal": 9, "differ": []}


# The picture.


@pytest.mark.parametrize(
    ("files", "without"),
    [
        ({}, ""),
        (own(), ", without two"),
        ({"metrics": None}, ", without two"),
        ({"metrics": [interval(2, 0.1, 0.1)], "summary": None}, ""),
    ],
)
def test_curves_are_drawn_of_what_has_samples(
    two: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], files: Record, without: str
) -> None:
    write(two, **files)
    file = tmp_path / "new/plot.png"
    assert command.main(["one", "two", "--storage", str(tmp_path), "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(PNG)
    assert capsys.readouterr().err.splitlines()[-1] == f"plot: {file}{without}"


def test_reports_are_drawn_where_both_runs_have_code_of_their_own(
    one: RunFolder, two: RunFolder, tmp_path: Path
) -> None:
    for folder in (one, two):
        write(folder, **own())
    runs = [run_comparison.read_run(folder.name, folder) for folder in (one, two)]
    assert [run_comparison.curves_of(run) for run in runs] == [{"error": [(1, 1.0), (2, 0.5)]}] * 2
    command.write_plot(runs, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


def test_a_plot_that_cannot_be_is_refused(one: RunFolder, two: RunFolder, tmp_path: Path) -> None:
    runs = [run_comparison.read_run(folder.name, folder) for folder in (one, two)]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        command.write_plot(runs, tmp_path / "file/plot.png")
    write(one, metrics=[])
    runs = [run_comparison.read_run(folder.name, folder) for folder in (one, two)]
    with pytest.raises(ConfigError, match="neither run has metrics"):
        command.write_plot(runs, tmp_path / "plot.png")


# The launcher's command.


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the launcher has the tool do."""
    calls: list[list[str]] = []

    def run_tool(module: str, arguments: Sequence[str]) -> int:
        calls.append([module, *arguments])
        return 0

    monkeypatch.setattr("trainyard.local.tools.run_tool", run_tool)
    return calls


@pytest.mark.parametrize(
    ("options", "passed_on"),
    [
        ({}, "--storage=runs -- one ./b/two"),
        (
            {"plot": Path("p.png"), "as_json": True, "storage": "s3://b", "endpoint": "http://h"},
            "--plot=p.png --json --storage=s3://b --endpoint=http://h -- one ./b/two",
        ),
    ],
)
def test_the_launcher_passes_on_what_was_typed(
    called: list[list[str]], options: dict[str, Any], passed_on: str
) -> None:
    assert compare("one", "./b/two", **options) == 0
    assert called == [["compare", *passed_on.split()]]


def test_a_namespace_and_a_storage_exclude_each_other(called: list[list[str]]) -> None:
    with pytest.raises(LauncherConfigError, match="--namespace excludes --storage"):
        compare("one", "two", namespace="team", storage="runs")
    assert called == []


def test_all_that_is_compared_is_copied_from_a_cluster(one: RunFolder) -> None:
    write(one, failures=[], progress={}, submission={})
    assert {*COMPARED} == {*one.files()}


def test_where_and_with_what_two_runs_ran_is_compared(tmp_path: Path) -> None:
    one, other = (RunFolder.open(str(tmp_path), name) for name in ("one", "two"))
    later = RECORD | {"attempt": 2, "git": {"revision": "2" * 40, "is_dirty": False}}
    write(one, run=CONFIG | {"record": [RECORD, later]})
    write(other)
    compared = [run_comparison.read_run(folder.name, folder) for folder in (one, other)]
    first, second = (run_comparison.environment_of(run) for run in compared)
    assert (
        first
        | {
            "image digest": "sha256:1",
            "git revision": "111111111111, dirty, 222222222222",
            "nodes": 1,
            "GPUs": "1 x H100",
            "GPU driver": "550",
            "GPU-hours": 3.0,
            "CPU-hours": 24.0,
            "nvidia-nccl-cu13": "2.28",
        }
        == first
    )
    assert "nodes" not in second
    assert run_comparison.config_of(*compared)["differ"] == [], (
        "the record is no part of the config"
    )
