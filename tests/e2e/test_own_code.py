"""A program of one's own on the cluster: its code travels, its workers have it, and a retry goes on."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from conftest import Team

pytestmark = pytest.mark.full

EXAMPLE = "examples/command.yaml"


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("own-code")
    team.install(tmp_path_factory.mktemp("values"))
    return team


def test_a_script_with_ray_train_runs_as_it_is_and_goes_on_where_it_stopped(team: Team) -> None:
    first = team.trainyard("submit", EXAMPLE)
    assert first.returncode == 0, first.stderr
    assert "succeeded: python ray_train.py --num-workers 2 --epochs 3 ended well" in first.stdout
    assert re.search(r"accuracy 0\.\d+ after 3 epochs", team.trainyard("logs", "own").stdout)
    more = ["python", "ray_train.py", "--num-workers", "{workers}", "--epochs", "4"]
    again = team.trainyard("submit", EXAMPLE, "--set", f"command={more}")
    assert again.returncode == 0, again.stderr
    log = team.trainyard("logs", "own").stdout
    assert "going on with epoch 3" in log
    assert "after 4 epochs" in log
    assert team.status("own")["summary"]["attempts"] == 2


def test_a_function_and_a_plain_ddp_script_run_on_the_cluster(team: Team) -> None:
    function = team.trainyard("submit", "examples/function.yaml")
    assert function.returncode == 0, function.stderr
    assert "succeeded: loop:train ended well" in function.stdout
    assert "epoch 5, loss" in function.stdout
    plain = team.trainyard("submit", "examples/torchrun.yaml")
    assert plain.returncode == 0, plain.stderr
    assert "epoch 3 of 2 workers" in team.trainyard("logs", "ddp").stdout


def test_a_program_that_fails_is_tried_again_and_explained(team: Team) -> None:
    settings = ("--set", "command=[sh, -c, 'echo \"attempt {attempt}\"; exit 7']")
    ended = team.trainyard(
        *("submit", EXAMPLE, "--name", "failing", "--set", "faults.retries=1"), *settings
    )
    assert ended.returncode == 1
    assert "the program ended with exit code 7" in ended.stderr
    assert team.status("failing")["summary"]["attempts"] == 2
    explained = team.trainyard("explain", "failing").stdout
    assert "exit code 7" in explained
