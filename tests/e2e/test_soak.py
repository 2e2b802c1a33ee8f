"""A soak of a minute on a real cluster: random faults, one after the other, and the weights at the end."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from conftest import Team, set_options
from drilling import DIGITS, SETTINGS, leaving_nothing

MINUTES = "1"
SHORT = "train.epochs=6"
"""The length of a round of the soak. Each round is trained without faults at the same time."""


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("soak")
    team.install(tmp_path_factory.mktemp("values"))
    return team


def test_a_run_that_is_struck_again_and_again_ends_as_if_nobody_had(team: Team) -> None:
    settings = set_options((*SETTINGS, SHORT))
    with leaving_nothing(team.namespace):
        ended = team.trainyard(
            "soak", str(DIGITS), "--minutes", MINUTES, "--beside", *settings, "--json"
        )
        assert ended.stdout, ended.stderr
        report = json.loads(ended.stdout)
        assert report["is_passed"], report["missed"]
        assert ended.returncode == 0
