"""How the workers of a run are packed by a label of nodes: as the pool says, or as the run file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from tests.launcher.pools import packed_platform
from trainyard.errors import ConfigError
from trainyard.planning.comparison.run_diff import diff_jobs
from trainyard.planning.nodes.placement import packing_of
from trainyard.planning.objects import run_objects
from trainyard.planning.plan import plan_run
from trainyard.planning.reasons import explain_plan
from trainyard.platform import Platform
from trainyard.run_file.load import load_run
from trainyard.run_file.models import RunConfig
from trainyard.run_file.queue import TopologyMode

DIGITS = Path(__file__).resolve().parents[2] / "examples/digits.yaml"
MODES: tuple[TopologyMode, ...] = get_args(TopologyMode)
PREFIX = "kueue.x-k8s.io/podset-"


def digits(mode: str | None, *settings: str) -> RunConfig:
    chosen = [f"resources.topology_mode={mode}"] if mode else []
    return load_run(DIGITS, [*chosen, *settings], gpus="16")


def job_of(mode: str | None, platform: Platform) -> dict[str, Any]:
    job: dict[str, Any] = run_objects(digits(mode), platform, "team").job
    return job


def template_of(mode: str | None, platform: Platform) -> dict[str, Any]:
    (group,) = job_of(mode, platform)["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    template: dict[str, Any] = group["template"]
    return template


def refusal(mode: str, platform: Platform, *settings: str) -> str:
    with pytest.raises(ConfigError) as raised:
        plan_run(digits(mode, *settings), platform, "team")
    return str(raised.value)


def placement(mode: str | None, platform: Platform) -> str:
    run = digits(mode)
    rows = {row.name: row for row in explain_plan(plan_run(run, platform, "team"), run, platform)}
    return rows["placement"].why


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("of_pool", ["preferred", "required"])
def test_a_run_file_replaces_the_mode_of_its_pool(
    of_pool: TopologyMode, mode: TopologyMode
) -> None:
    value = "true" if mode == "unconstrained" else "rack"
    annotations = template_of(mode, packed_platform(mode=of_pool))["metadata"]["annotations"]
    assert annotations == {f"{PREFIX}{mode}-topology": value}


@pytest.mark.parametrize("mode", MODES)
def test_without_a_mode_the_run_is_packed_as_its_pool_says(mode: TopologyMode) -> None:
    packing = packing_of(template_of(None, packed_platform(mode=mode)))
    assert packing is not None
    assert (packing.mode, packing.is_by_kueue) == (mode, True)


def test_the_scheduler_packs_a_run_unless_the_run_file_says_otherwise() -> None:
    platform = packed_platform()
    assert packing_of(template_of("preferred", platform)) == packing_of(template_of(None, platform))
    assert packing_of(template_of("unconstrained", platform)) is None


@pytest.mark.parametrize(
    ("mode", "platform", "words"),
    [
        (
            "required",
            packed_platform(),
            "resources.topology_mode = required needs Kueue, and the platform's queue system is none",
        ),
        (
            "preferred",
            packed_platform(mode="unconstrained"),
            "but pool gpu has topologyMode unconstrained",
        ),
    ],
)
def test_a_mode_that_cannot_be_is_refused(mode: str, platform: Platform, words: str) -> None:
    assert words in refusal(mode, platform)


def test_a_mode_needs_a_label(platform: Platform) -> None:
    said = refusal("required", platform)
    assert "but pool gpu has no topologyKey" in said
    assert "set topologyKey of pool gpu in the chart's values" in said


def test_a_standing_cluster_is_not_packed() -> None:
    with pytest.raises(ConfigError, match="no topology_mode"):
        digits("required", "resources.cluster=trainyard")


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("preferred", "; packed by rack if possible"),
        ("required", "; all on nodes with the same rack, or the run waits"),
        ("unconstrained", "; not packed; Kueue looks for a node for each pod"),
    ],
)
def test_the_plan_says_how_workers_are_packed(mode: TopologyMode, words: str) -> None:
    assert words in placement(mode, packed_platform(mode="preferred"))


def test_another_mode_changes_the_pods_and_not_what_is_trained() -> None:
    platform = packed_platform(mode="preferred")
    changes = diff_jobs(job_of(None, platform), job_of("required", platform), live=False)
    assert changes
    assert {change.effect for change in changes} == {"next attempt"}
