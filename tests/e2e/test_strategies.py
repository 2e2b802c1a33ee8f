"""Each strategy to distribute a model over workers, and each recipe, once on the cluster."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Ended, Team, set_options
from drilling import DIGITS, check, leaving_nothing, strike

from trainyard.drills.scenarios import SCENARIOS

SHARES = {
    "fsdp2": "__1_0.distcp",
    "deepspeed": "zero_pp_rank_1_mp_rank_00_optim_states.pt",
}
"""The suffix of a file with the second worker's shard of a checkpoint, by strategy."""
SHORT = ("train.model.image_size=16", "train.epochs=1")


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("strategies")
    team.install(tmp_path_factory.mktemp("values"))
    return team


@pytest.fixture(scope="module")
def ended(team: Team) -> dict[str, Ended]:
    """The results of a run with each strategy. They train in parallel, because they mostly wait for pods."""
    submit = ("submit", str(DIGITS), "--workers", "2", *set_options(SHORT))
    commands = [(*submit, "--name", each, "--set", f"train.strategy={each}") for each in SHARES]
    return dict(zip(SHARES, team.at_once(*commands), strict=True))


@pytest.mark.parametrize("strategy", SHARES)
def test_a_run_is_trained_saved_in_shares_and_delivered_whole(
    team: Team, ended: dict[str, Ended], strategy: str, tmp_path: Path
) -> None:
    assert ended[strategy].returncode == 0, ended[strategy].stderr
    assert team.status(strategy)["summary"]["outcome"] == "succeeded"
    listed = team.trainyard("cp", f"{strategy}:checkpoints").stdout
    assert f"shards/{SHARES[strategy]}" in listed
    for file in ("model.pt", "model.json"):
        assert team.trainyard("cp", f"{strategy}:{file}", str(tmp_path)).returncode == 0
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    facts = json.loads((tmp_path / "model.json").read_text())
    assert weights["fc.weight"].shape == (facts["model"]["num_classes"], 512)


@pytest.mark.full
def test_a_language_model_is_trained_and_delivered(team: Team, tmp_path: Path) -> None:
    example = DIGITS.with_name("language_model.yaml")
    ended = team.trainyard(
        "submit", str(example), "--workers", "2", "--name", "text", "--set", "train.epochs=1"
    )
    assert ended.returncode == 0, ended.stderr
    summary = team.status("text")["summary"]
    assert summary["outcome"] == "succeeded"
    assert summary["tokens_per_s"] > 0
    for file in ("model.pt", "model.json", "report.html"):
        assert team.trainyard("cp", f"text:{file}", str(tmp_path)).returncode == 0
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    facts = json.loads((tmp_path / "model.json").read_text())
    assert facts["recipe"] == "language_model"
    assert weights["bytes.weight"].shape == (256, facts["model"]["width"])
    assert "What it writes" in (tmp_path / "report.html").read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    ("library", "file", "count"),
    [("xgboost", "model.ubj", "num_features"), ("lightgbm", "model.txt", "num_feature")],
)
def test_trees_are_grown_by_two_workers_and_delivered(
    team: Team, library: str, file: str, count: str, tmp_path: Path
) -> None:
    example = DIGITS.with_name("gradient_boosting.yaml")
    settings = (f"train.library={library}", "train.rounds=10")
    options = set_options(settings)
    ended = team.trainyard("submit", str(example), "--name", library, *options)
    assert ended.returncode == 0, ended.stderr
    summary = team.status(library)["summary"]
    assert (summary["outcome"], summary["rounds"], summary["workers"]) == ("succeeded", 10, 2)
    for each in (file, "model.json", "report.html"):
        assert team.trainyard("cp", f"{library}:{each}", str(tmp_path)).returncode == 0
    facts = json.loads((tmp_path / "model.json").read_text())
    assert facts["file"] == file
    booster = importlib.import_module(library).Booster(model_file=str(tmp_path / file))
    assert getattr(booster, count)() == 30
    assert "Feature importance" in (tmp_path / "report.html").read_text()


@pytest.mark.full
@pytest.mark.parametrize("strategy", SHARES)
def test_a_run_that_loses_a_worker_ends_as_if_it_had_not(
    team: Team, strategy: str, tmp_path: Path
) -> None:
    settings = (f"train.strategy={strategy}", "train.epochs=6")
    scenario = replace(SCENARIOS["worker-killed"], settings=settings)
    with leaving_nothing(team.namespace):
        check(strike(team, scenario, tmp_path).to_json())
