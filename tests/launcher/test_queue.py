"""A run waits in the queue of its platform: labels, suspension and clean-up as each system wants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import ConfigError
from trainyard.planning.merge import merge
from trainyard.planning.plan import plan_run
from trainyard.planning.reasons import explain_plan
from trainyard.planning.render import render_job
from trainyard.platform import Platform, PlatformQueue
from trainyard.run_file.load import load_run
from trainyard.run_file.queue import System

DIGITS = Path(__file__).resolve().parents[2] / "examples/digits.yaml"
OWN_LABELS = {"app.kubernetes.io/managed-by": "trainyard", "trainyard.io/run": "digits"}


def queued(platform: Platform, system: System, name: str = "team") -> Platform:
    return platform.model_copy(update={"queue": PlatformQueue(system=system, name=name)})


def job_of(platform: Platform, *settings: str, namespace: str = "vision") -> dict[str, Any]:
    plan = plan_run(load_run(DIGITS, settings, gpus="16"), platform, namespace)
    return merge(render_job(plan), platform, plan)


@pytest.mark.parametrize(
    ("system", "settings", "labels"),
    [
        ("none", [], {}),
        ("kueue", [], {"kueue.x-k8s.io/queue-name": "team"}),
        (
            "kueue",
            ["queue.name=own", "queue.priority=high"],
            {"kueue.x-k8s.io/queue-name": "own", "kueue.x-k8s.io/priority-class": "high"},
        ),
        (
            "volcano",
            ["queue.priority=high"],
            {"volcano.sh/queue-name": "team", "ray.io/priority-class-name": "high"},
        ),
        (
            "yunikorn",
            ["queue.name=root.own"],
            {
                "yunikorn.apache.org/queue": "root.own",
                "yunikorn.apache.org/app-id": "digits-5944ae84",
                "ray.io/gang-scheduling-enabled": "true",
            },
        ),
        ("kai", [], {"kai.scheduler/queue": "team"}),
    ],
)
def test_each_system_finds_its_labels_on_the_rayjob(
    platform: Platform, system: System, settings: list[str], labels: dict[str, str]
) -> None:
    job = job_of(queued(platform, system), *settings)
    assert job["metadata"]["labels"] == OWN_LABELS | labels


@pytest.mark.parametrize("system", ["kueue", "volcano", "yunikorn", "kai"])
def test_pods_carry_no_label_of_the_queue(platform: Platform, system: System) -> None:
    spec = job_of(queued(platform, system))["spec"]["rayClusterSpec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        labels = group["template"]["metadata"]["labels"]
        assert labels == OWN_LABELS | {"app.kubernetes.io/part-of": "trainyard"}


@pytest.mark.parametrize("system", ["none", "kueue", "volcano", "yunikorn", "kai"])
def test_a_gang_is_the_whole_run(platform: Platform, system: System) -> None:
    (group,) = job_of(queued(platform, system))["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["minReplicas"] == group["replicas"] == group["maxReplicas"] == 2


def test_kueue_lets_a_run_start_and_gets_the_clean_up_that_it_accepts(platform: Platform) -> None:
    spec = job_of(queued(platform, "kueue"))["spec"]
    assert spec["suspend"] is True
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["ttlSecondsAfterFinished"] == 0
    assert "deletionStrategy" not in spec


@pytest.mark.parametrize("system", ["none", "volcano", "yunikorn", "kai"])
def test_without_kueue_workers_go_after_a_failure_and_the_head_stays(
    platform: Platform, system: System
) -> None:
    spec = job_of(queued(platform, system))["spec"]
    assert spec["shutdownAfterJobFinishes"] is False
    assert not {"suspend", "ttlSecondsAfterFinished"} & spec.keys()
    rules = {
        (*(set(rule["condition"].values()) - {rule["condition"]["ttlSeconds"]}), rule["policy"]):
        rule["condition"]["ttlSeconds"]
        for rule in spec["deletionStrategy"]["deletionRules"]
    }  # fmt: skip
    assert rules == {
        ("SUCCEEDED", "DeleteCluster"): 600,
        ("FAILED", "DeleteWorkers"): 0,
        ("FAILED", "DeleteCluster"): 3600,
        ("Failed", "DeleteWorkers"): 0,
        ("Failed", "DeleteCluster"): 3600,
    }


def test_runs_of_one_name_in_two_namespaces_are_two_applications(platform: Platform) -> None:
    applications = {
        job_of(queued(platform, "yunikorn"), namespace=namespace)["metadata"]["labels"][
            "yunikorn.apache.org/app-id"
        ]
        for namespace in ("vision", "speech")
    }
    assert len(applications) == 2


@pytest.mark.parametrize(
    ("system", "name", "settings", "message", "remedy"),
    [
        ("none", "", ["queue.name=own"], "the platform has no queue system", "queue.system"),
        ("none", "", ["queue.priority=high"], "'priority': 'high'", "Remove `queue`"),
        (
            "kueue",
            "",
            [],
            "neither the run file nor the platform sets a queue",
            "queue: {name: ...}",
        ),
        ("kai", "team", ["queue.priority=high"], "kai reads no priority", "kueue, volcano"),
        ("yunikorn", "root", ["queue.priority=high"], "yunikorn reads no priority", "Remove it"),
    ],
)
def test_what_the_platform_cannot_do_is_refused(
    platform: Platform,
    system: System,
    name: str,
    settings: list[str],
    message: str,
    remedy: str,
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        job_of(queued(platform, system, name), *settings)
    assert remedy in str(raised.value)


@pytest.mark.parametrize("name", ["two words", "-team", "a/b", "x" * 64, "''"])
def test_a_queue_has_the_name_of_a_label(name: str) -> None:
    with pytest.raises(ConfigError, match=r"queue\.name"):
        load_run(DIGITS, [f"queue.name={name}"])


def test_the_plan_tells_queue_and_clean_up(platform: Platform) -> None:
    run = load_run(DIGITS, ["queue.name=own"], gpus="16")
    kueue = queued(platform, "kueue")
    rows = {row.name: row for row in explain_plan(plan_run(run, kueue, "vision"), run, kueue)}
    assert rows["queue"].value == "own"
    assert "from the run file" in rows["queue"].why
    assert rows["after the end"].value == "0 s"
