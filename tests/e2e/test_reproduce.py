"""The records of a run are sufficient to submit it again, and to compare both runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import Team

pytestmark = pytest.mark.full

DIGITS = "examples/digits.yaml"
SHORT = ("--workers", "2", "--set", "train.epochs=1")


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("reproduce")
    team.install(tmp_path_factory.mktemp("values"))
    return team


def test_a_run_is_rendered_and_trained_again_and_compared(team: Team, tmp_path: Path) -> None:
    rendered = team.trainyard("render", DIGITS, *SHORT, "--git", "--from-cluster")
    first = team.trainyard("submit", DIGITS, *SHORT)
    assert first.returncode == 0, first.stderr

    again = team.trainyard("reproduce", "digits")
    assert again.returncode == 0, again.stderr
    assert again.stdout == rendered.stdout
    assert "it equals what was submitted: RayJob digits-" in again.stderr

    second = team.trainyard("reproduce", "digits", "--name", "second", "--submit")
    assert second.returncode == 0, second.stderr
    assert "succeeded: validation accuracy" in second.stdout

    plot = tmp_path / "curves.png"
    compared = team.trainyard("compare", "digits", "second", "--json", "--plot", str(plot))
    assert compared.returncode == 0, compared.stderr
    found = json.loads(compared.stdout)
    assert found["config"]["differ"] == []
    one, two = found["runs"]
    assert (one["notes"], two["notes"]) == ([], [])
    assert one["metrics"] == two["metrics"]
    assert one["environment"]["image"] == team.image
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_on_another_platform_what_differs_is_told(team: Team, tmp_path: Path) -> None:
    platform = yaml.safe_load(team.trainyard("platform", "get").stdout)
    platform["job"]["ttlSecondsAfterFinished"] += 1
    file = tmp_path / "platform.yaml"
    file.write_text(yaml.safe_dump(platform))
    again = team.trainyard("reproduce", "digits", "--platform", str(file))
    assert again.returncode == 0, again.stderr
    assert "it differs from what was submitted" in again.stderr
    assert ", in job (" in again.stderr
    rendered = team.trainyard("render", DIGITS, *SHORT, "--git", "--platform", str(file))
    assert again.stdout == rendered.stdout


def test_code_of_ones_own_travels_once_more(team: Team) -> None:
    example = "examples/function.yaml"
    rendered = team.trainyard("render", example, "--git", "--from-cluster")
    first = team.trainyard("submit", example)
    assert first.returncode == 0, first.stderr
    again = team.trainyard("reproduce", "line")
    assert again.returncode == 0, again.stderr
    assert again.stdout == rendered.stdout
    second = team.trainyard("reproduce", "line", "--name", "line-again", "--submit")
    assert second.returncode == 0, second.stderr
    compared = team.trainyard("compare", "line", "line-again", "--json")
    found = json.loads(compared.stdout)
    assert found["config"]["differ"] == []
    assert [run["result"]["reports"] for run in found["runs"]] == [5, 5]


def test_a_run_that_is_not_there_is_told(team: Team) -> None:
    for command in (("reproduce", "nobody"), ("compare", "line", "nobody")):
        ended = team.trainyard(*command)
        assert ended.returncode == 2
        assert "there is no run nobody" in ended.stderr
