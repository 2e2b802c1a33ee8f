"""A recipe of the user on a real cluster: its code reaches all workers, and it survives a killed one."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from conftest import ROOT, Team, set_options
from drilling import check, leaving_nothing

AUTOENCODER = ROOT / "examples/autoencoder.yaml"
LENGTH = "train.epochs=150"
"""Long enough that the run is struck before its end."""


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("own-recipe")
    team.install(tmp_path_factory.mktemp("values"))
    return team


def test_it_loses_a_worker_and_ends_with_the_same_weights(team: Team) -> None:
    with leaving_nothing(team.namespace):
        settings = set_options((LENGTH,))
        ended = team.trainyard("drill", "worker-killed", str(AUTOENCODER), *settings, "--json")
        assert ended.stdout, ended.stderr
        result = json.loads(ended.stdout)
        check(result)
        assert result["has_equal_weights"]
