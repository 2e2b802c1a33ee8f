"""A shared volume that fails under a run for a while: nothing is lost, and no attempt is spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Team, get, wait_for
from drilling import check, check_nothing_is_left, keep, strike
from fault_folder import Fault, fault_folder

from launcher.drill.scenarios import WORKER_S, Scenario
from launcher.drill.strikes import Target

pytestmark = pytest.mark.drills

FAULT_S = 45.0
FAULTS = {
    "storage-full": ("full", "the storage is full for 45 s", "training waits, and saving is tried again"),
    "storage-read-only": (
        "read-only", "the storage is read-only for 45 s", "training waits, and saving is tried again",
    ),
    "storage-slow": ("slow 100ms", "for 45 s each access to the storage takes 0.1 s", "saves take longer"),
}  # fmt: skip


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("storage")
    team.install(tmp_path_factory.mktemp("values"))
    return team


@pytest.fixture(scope="module")
def fault(team: Team) -> Iterator[Fault]:
    """Of the folder that is the team's volume."""
    name = wait_for("the claim is bound", lambda: volume_of(team))
    volume = get("pv", "default", name)
    if "hostPath" not in volume["spec"]:
        pytest.skip("only the volumes of tests/cluster are folders of this machine")
    with fault_folder(Path(volume["spec"]["hostPath"]["path"])) as fault:
        yield fault


def volume_of(team: Team) -> str:
    claim = get("pvc", team.namespace, "trainyard-storage")
    return str(claim["spec"].get("volumeName", ""))


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_outlasts_what_its_storage_suffers_from(
    team: Team, fault: Fault, name: str, tmp_path: Path
) -> None:
    words, what, answer = FAULTS[name]

    def suffer(target: Target) -> None:
        fault.begin(words)
        time.sleep(FAULT_S)  # the fault's own length
        fault.end()

    scenario = Scenario(
        name=name,
        fault=what,
        answer=answer,
        actor="trainer",
        rights="the machine",
        strike=suffer,
        within_s=WORKER_S,
        has_notice=True,
        is_felt=False,
    )
    result = strike(team, scenario, tmp_path).to_json()
    keep(result, scenario)
    check(result, scenario)
    check_nothing_is_left(team)
    assert result["attempts"] == result["worker_groups"] == 1
