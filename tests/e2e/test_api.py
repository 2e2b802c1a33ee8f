"""A run on a real cluster through the Python API, as in a notebook: submit, watch, result, predict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, Team

from trainyard import Run, load_run, render_run, submit_run, watch_run
from trainyard.errors import ConfigError, RunFailed

EPOCHS = 3


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("api")
    team.install(tmp_path_factory.mktemp("values"))
    return team


def test_a_notebook_submits_watches_and_predicts(team: Team, tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    digits = load_run(ROOT / "examples/digits.yaml", [f"train.epochs={EPOCHS}"], name="notebook")
    run = submit_run(digits, team.namespace)
    submit_run(digits, team.namespace)
    (job,) = team.rayjobs()
    rendered = render_run(digits, "cluster", team.namespace)
    assert job["metadata"]["name"] == rendered["metadata"]["name"]

    statuses = list(watch_run("notebook", team.namespace))
    assert statuses[-1].phase == "succeeded"
    assert "running" in [run_status.phase for run_status in statuses]

    result = run.result()
    frame = result.metrics_dataframe
    assert list(frame[frame.kind == "epoch"].epoch) == list(range(1, EPOCHS + 1))
    summary = team.status("notebook")["summary"]
    # The driver's log has the summary without the record of all attempts.
    assert result.summary == summary | {"record": result.summary["record"]}
    assert [attempt["attempt"] for attempt in result.summary["record"]] == [1]
    assert result.metrics["val_accuracy"] == summary["val_accuracy"]
    assert result.last_checkpoint is not None
    assert result.last_checkpoint.step == summary["steps"]
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.metrics["val_accuracy"] == summary["best_val_accuracy"]

    data = load_digits()
    told = result.predict((data.images * (255 / 16)).astype("uint8"))
    right = [int(each.label) == label for each, label in zip(told, data.target, strict=True)]
    assert sum(right) / len(right) > 0.8
    (model,) = result.download(tmp_path / "model.pt")
    copied = team.trainyard("cp", "notebook:model.pt", str(tmp_path / "copied.pt"))
    assert copied.returncode == 0, copied.stderr
    assert model.read_bytes() == (tmp_path / "copied.pt").read_bytes()


@pytest.mark.full
def test_a_run_is_found_by_its_name_when_its_rayjob_is_gone(team: Team) -> None:
    deleted = team.trainyard("delete", "notebook", "--yes")
    assert deleted.returncode == 0, deleted.stderr
    run = Run("notebook", namespace=team.namespace)
    assert run.status().phase == "succeeded"
    assert run.result().metrics["epoch"] == EPOCHS
    with pytest.raises(ConfigError, match="there is no run none"):
        Run("none", namespace=team.namespace).status()


@pytest.mark.full
def test_a_run_that_fails_raises_what_explain_says(team: Team) -> None:
    failing = load_run(
        {
            "name": "failing",
            "resources": {"workers": 1},
            "faults": {"retries": 0},
            "command": ["sh", "-c", "exit 7"],
        }
    )
    with pytest.raises(RunFailed, match="run failing failed") as raised:
        submit_run(failing, team.namespace).result()
    assert "exit code 7" in str(raised.value)
