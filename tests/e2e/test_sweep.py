"""Many runs of one run file on the cluster: a limited number at a time, a table, and nothing twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Ended, Team

SMALL = (
    *("--set", "train.optimizer.name=sgd", "--set", "train.model.image_size=16"),
    *("--set", "train.epochs=1", "--workers", "1", "--max-parallel", "2", "--json"),
)
SWEEP = (
    *("sweep", "examples/digits.yaml", "train.seed=1,2", "train.optimizer.learning_rate=0.02,0.1"),
    *SMALL,
)


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("sweep")
    team.install(tmp_path_factory.mktemp("values"))
    return team


@pytest.fixture(scope="module")
def ended(team: Team) -> Ended:
    """The result of the sweep."""
    return team.trainyard(*SWEEP)


def rows_of(ended: Ended) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(ended.stdout)["runs"]
    return rows


def test_each_combination_is_trained_and_the_best_is_marked(team: Team, ended: Ended) -> None:
    assert ended.returncode == 0, ended.stderr
    rows = rows_of(ended)
    assert [tuple(row["settings"].values()) for row in rows] == [
        *(("1", "0.02"), ("1", "0.1"), ("2", "0.02"), ("2", "0.1"))
    ]
    assert {(row["phase"], row["epochs"]) for row in rows} == {("succeeded", 1)}
    accuracies = [row["metrics"]["val_accuracy"] for row in rows]
    (best,) = (row for row in rows if row["best"])
    assert best["metrics"]["val_accuracy"] == max(accuracies)
    assert len(team.rayjobs()) == 4
    assert team.status(best["run"])["summary"]["val_accuracy"] == max(accuracies)


def test_two_at_most_were_live_at_once(team: Team, ended: Ended) -> None:
    assert ended.returncode == 0, ended.stderr
    # The API server's times are whole seconds, so a run may end in the second in which another begins.
    moments = [
        (moment, change)
        for job in team.rayjobs()
        for moment, change in (
            (job["metadata"]["creationTimestamp"], 1),
            (job["status"]["endTime"], -1),
        )
    ]
    live = most = 0
    for _, change in sorted(moments):
        live += change
        most = max(most, live)
    assert most == 2


def test_the_same_again_submits_nothing_and_reads_the_loss_from_the_folders(
    team: Team, ended: Ended
) -> None:
    assert ended.returncode == 0, ended.stderr
    before = {job["metadata"]["uid"] for job in team.rayjobs()}
    again = team.trainyard(*SWEEP, "--metric", "val_loss")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("succeeded before") == 4
    assert {job["metadata"]["uid"] for job in team.rayjobs()} == before
    losses = {row["run"]: row["metrics"]["val_loss"] for row in rows_of(again)}
    (best,) = (row["run"] for row in rows_of(again) if row["best"])
    assert losses[best] == min(losses.values())


@pytest.mark.full
def test_a_run_that_fails_stops_no_other_and_is_tried_once_more_by_the_next_command(
    team: Team, ended: Ended
) -> None:
    assert ended.returncode == 0, ended.stderr
    models = ("sweep", "examples/digits.yaml", "train.model.name=no-such-model,resnet18")
    once = ("--set", "faults.retries=0")
    first = team.trainyard(*models, *SMALL, *once)
    assert first.returncode == 1, first.stderr
    failed, good = rows_of(first)
    assert (failed["phase"], good["phase"], good["best"]) == ("failed", "succeeded", True)
    assert "no-such-model" in failed["message"]
    again = team.trainyard(*models, *SMALL, *once)
    assert again.returncode == 1, again.stderr
    assert again.stderr.count("submitted again") == 1
    assert f"{good['run']} (train.model.name=resnet18): succeeded before" in again.stderr
