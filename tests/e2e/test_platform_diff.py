"""`platform diff` tells what an upgrade of the chart reaches, given what the API server stores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import VALUES, Object, Team, run

from tests.support.settings import set_all

PRE_PULL = {"prePull__enabled": True, "prePull__pools": ["cpu"]}
KUBERAY = ("--api-versions=ray.io/v1/RayJob", "--api-versions=ray.io/v1/RayCluster")
OTHER_NODES = {"disk": "ssd"}


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    """A team with pods that pull the image in advance."""
    team = make_team("upgrade")
    team.install(tmp_path_factory.mktemp("values"), **PRE_PULL)
    return team


def upgrade(team: Team, folder: Path, **changes: object) -> dict[str, str]:
    """Return what an upgrade with changed values would reach, by path."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(set_all(yaml.safe_load(VALUES.read_text()), PRE_PULL | changes)))
    rendered = run(
        *("helm", "template", "trainyard", "charts/trainyard", "--namespace", team.namespace),
        *("--values", file, "--set", f"image={team.image}", *KUBERAY),
    )
    assert rendered.returncode == 0, rendered.stderr
    (folder / "upgrade.yaml").write_text(rendered.stdout)
    ended = team.trainyard("platform", "diff", "--file", str(folder / "upgrade.yaml"), "--json")
    found: list[Object] = json.loads(ended.stdout)
    assert ended.returncode == (1 if found else 0), ended.stderr
    assert "not compared" not in ended.stderr
    return {each["path"]: each["affects"] for each in found}


def test_an_upgrade_with_the_same_values_reaches_nothing(team: Team, tmp_path: Path) -> None:
    assert upgrade(team, tmp_path) == {}


def test_other_nodes_of_a_pool_reach_its_later_runs_and_its_pre_pull_pods(
    team: Team, tmp_path: Path
) -> None:
    reached = upgrade(team, tmp_path, pools__cpu__nodeSelector=OTHER_NODES)
    runs = "rayClusterSpec.workerGroupSpecs.cpu.template.spec.nodeSelector"
    pulling = "prePull.cpu.spec.nodeSelector"
    assert {path.removesuffix(".disk") for path in reached} == {runs, pulling}
    for path, affects in reached.items():
        expected = "pre-pull pods of pool cpu" if path.startswith("prePull") else "runs on pool cpu"
        assert expected in affects


def test_a_label_of_all_pods_reaches_each_kind_of_pod(team: Team, tmp_path: Path) -> None:
    reached = upgrade(team, tmp_path, pod__labels={"team": "vision"})
    kinds = (
        "headGroupSpec",
        "workerGroupSpecs.cpu",
        "workerGroupSpecs.gpu",
        "readerPod",
        "prePull.cpu",
    )
    for kind in kinds:
        assert [path for path in reached if kind in path], kind


def test_pre_pull_pods_that_end_are_told(team: Team, tmp_path: Path) -> None:
    reached = upgrade(team, tmp_path, prePull__enabled=False)
    assert reached == {"prePull.cpu": "the pre-pull pods of pool cpu, which are deleted at once"}
