"""A run with separate nodes for the Ray loader on a real cluster, selected by Ray's labels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import Team

pytestmark = pytest.mark.full

RUN = (
    *("examples/digits.yaml", "--name", "fed", "--workers", "1"),
    *("--set", "data.loader=ray", "--set", "resources.data={nodes: 1}"),
    *("--set", "train.model.image_size=16", "--set", "train.epochs=2"),
)


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("data")
    team.install(tmp_path_factory.mktemp("values"))
    return team


def test_a_run_is_fed_by_nodes_that_do_not_train(team: Team) -> None:
    # Without a node with the label, no data task could run, and the run would not end.
    ended = team.trainyard("submit", *RUN)
    assert ended.returncode == 0, ended.stderr
    assert team.status("fed")["summary"]["outcome"] == "succeeded"
    (job,) = team.rayjobs()
    train, data = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert (data["groupName"], data["labels"]) == ("cpu-data", {"trainyard.io/nodes": "data"})
    assert [train["replicas"], data["replicas"]] == [1, 1]
