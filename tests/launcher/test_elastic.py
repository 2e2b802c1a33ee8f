"""Runs that grow and shrink with their cluster, and runs with nodes for the Ray loader alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launcher.pools import packed_platform
from trainyard.errors import ConfigError
from trainyard.local.training import local_config
from trainyard.planning.merge import merge
from trainyard.planning.plan import plan_run
from trainyard.planning.reasons import explain_plan
from trainyard.planning.render import render_job
from trainyard.platform import Platform, PlatformQueue
from trainyard.rules.check import check
from trainyard.run_file.load import load_run
from trainyard.run_file.models import RunConfig
from trainyard_trainer.config.scaling import DATA_LABELS, WORKER_RESOURCE

DIGITS = Path(__file__).resolve().parents[2] / "examples/digits.yaml"
ON_DATA_NODES = ("data.loader=ray", "resources.data={nodes: 3}")


def digits(*settings: str, gpus: str | None = None, workers: str | None = None) -> RunConfig:
    return load_run(DIGITS, settings, gpus=gpus, workers=workers)


def refusal(run: RunConfig, platform: Platform) -> str:
    with pytest.raises(ConfigError) as raised:
        plan_run(run, platform, "team")
    return str(raised.value)


def job_of(run: RunConfig, platform: Platform) -> dict[str, Any]:
    plan = plan_run(run, platform, "team")
    return merge(render_job(plan), platform, plan)


def groups_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    return groups


def replicas(group: dict[str, Any]) -> list[int]:
    return [group[key] for key in ("replicas", "minReplicas", "maxReplicas")]


def test_a_run_starts_with_its_fewest_nodes_and_may_get_its_most(platform: Platform) -> None:
    plan = plan_run(digits(gpus="8:16"), platform, "team")
    assert (plan.min_nodes, plan.nodes, plan.workers_per_node) == (1, 2, 8)
    scaling = plan.trainer.scaling
    assert (scaling.min_workers, scaling.num_workers) == (8, 16)
    assert list(scaling.sizes) == [8, 16]


@pytest.mark.parametrize(
    ("gpus", "batch", "problems"),
    [
        ("4:16", 64, ["grows by whole nodes, and pool gpu has 8 GPUs per node", "use 8:16,"]),
        ("8:12", 64, ["grows by whole nodes", "use 8:16,"]),
        (
            "8:32",
            64,
            [
                "cannot be shared equally by 24 workers",
                "Possible sizes with train.global_batch_size = 64: 8, 16, 32, 64; use 8:16, in which",
                "a multiple of 96 as batch",
            ],
        ),
        ("8:24", 40, ["Possible sizes with train.global_batch_size = 40: 8, 40; no range"]),
        ("8:16", 9, ["train.global_batch_size = 9: none; no range has only possible sizes"]),
    ],
)
def test_a_run_is_exact_at_each_of_its_sizes(
    platform: Platform, gpus: str, batch: int, problems: list[str]
) -> None:
    message = refusal(digits(f"train.global_batch_size={batch}", gpus=gpus), platform)
    assert [problem for problem in problems if problem not in message] == []


@pytest.mark.parametrize("workers", ["1:4", "4"])
def test_cpu_workers_count_their_places(platform: Platform, workers: str) -> None:
    run = digits("train.global_batch_size=12", workers=workers)
    assert plan_run(run, platform, "team").trainer.scaling.has_worker_places


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"queue": PlatformQueue(system="kueue", name="q")},
            "Set queue.kueue.elastic in the chart's values if Kueue's feature gate "
            "ElasticJobsViaWorkloadSlices is enabled, or use a fixed number: 8 or 16.",
        ),
        ({"autoscaler": None}, "the platform has no autoscaler"),
    ],
)
def test_where_nothing_can_grow_an_elastic_run_is_refused(
    platform: Platform, change: dict[str, object], problem: str
) -> None:
    assert problem in refusal(digits(gpus="8:16"), platform.model_copy(update=change))


SLICED = PlatformQueue(system="kueue", name="q", elastic=True)


def test_kueue_changes_the_size_of_a_run_that_asks_for_it(platform: Platform) -> None:
    queued = platform.model_copy(update={"queue": SLICED})
    job = job_of(digits(gpus="8:16"), queued)
    assert job["metadata"]["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}
    assert job["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"] is True
    found = check(job, queued.kuberay, queued.ray_version)
    assert [one for one in found if one.severity == "error"] == []
    assert "annotations" not in job_of(digits(gpus="16"), queued)["metadata"]


def test_the_workers_of_an_elastic_run_in_kueue_are_not_packed(platform: Platform) -> None:
    packed = packed_platform(platform, "preferred").model_copy(update={"queue": SLICED})
    said = refusal(digits(gpus="8:16"), packed)
    assert "pool gpu has a topologyKey" in said
    assert "use a fixed number: 8 or 16." in said


def test_the_plan_tells_both_ends(platform: Platform) -> None:
    run = digits(gpus="8:16")
    plan = plan_run(run, platform, "team")
    rows = {row.name: row.value for row in explain_plan(plan, run, platform)}
    assert (rows["nodes"], rows["workers"]) == ("1 to 2", "8 to 16")
    assert rows["batch per worker"] == "4 (8 with 8 workers)"
    assert rows["autoscaler"] == "cpu 500m, memory 512Mi"


def test_rays_autoscaler_and_no_other_container_has_a_token(platform: Platform) -> None:
    job = job_of(digits(gpus="8:16"), platform)
    spec = job["spec"]["rayClusterSpec"]
    (group,) = groups_of(job)
    assert replicas(group) == [1, 1, 2]
    assert spec["enableInTreeAutoscaling"] is True
    assert platform.autoscaler is not None
    assert spec["autoscalerOptions"] == platform.autoscaler.options
    token = "autoscaler-token"
    assert token in [mount["name"] for mount in spec["autoscalerOptions"]["volumeMounts"]]
    head = spec["headGroupSpec"]["template"]["spec"]
    assert token in [volume["name"] for volume in head["volumes"]]
    assert not head["automountServiceAccountToken"]
    for pod in (head, group["template"]["spec"]):
        for container in pod["containers"]:
            assert token not in [mount["name"] for mount in container["volumeMounts"]]


def test_kuberay_allows_no_staged_deletion_of_what_it_scales(platform: Platform) -> None:
    spec = job_of(digits(gpus="8:16"), platform)["spec"]
    assert spec["shutdownAfterJobFinishes"] is True
    assert "deletionStrategy" not in spec


def test_a_fixed_run_has_no_autoscaler(platform: Platform) -> None:
    spec = job_of(digits(gpus="16"), platform)["spec"]["rayClusterSpec"]
    assert {"enableInTreeAutoscaling", "autoscalerOptions"} & spec.keys() == set()


def test_one_machine_trains_an_elastic_run_with_its_fewest_workers(tmp_path: Path) -> None:
    scaling = local_config(digits(workers="2:4"), tmp_path, 4).scaling
    assert (scaling.num_workers, scaling.min_workers) == (2, None)


def test_data_nodes_are_whole_nodes_of_a_pool_without_gpus(platform: Platform) -> None:
    plan = plan_run(digits(*ON_DATA_NODES, gpus="8"), platform, "team")
    assert plan.data is not None
    assert (plan.data.pool, plan.data.nodes, plan.data.node.memory_mib) == ("cpu", 3, 4096)
    assert plan.trainer.data.ray_nodes == DATA_LABELS


def test_data_nodes_are_a_group_with_labels_of_their_own(platform: Platform) -> None:
    train, data = groups_of(job_of(digits(*ON_DATA_NODES), platform))
    assert (train["groupName"], data["groupName"]) == ("cpu", "cpu-data")
    assert (train.get("labels"), data["labels"]) == (None, DATA_LABELS)
    assert replicas(data) == [3, 3, 3]
    # CPU workers would fit on data nodes, too: only nodes of their own have places for them.
    assert (train["resources"], data.get("resources")) == ({WORKER_RESOURCE: "1"}, None)


def test_gpu_workers_need_no_places(platform: Platform) -> None:
    train, _ = groups_of(job_of(digits(*ON_DATA_NODES, gpus="8"), platform))
    assert "resources" not in train


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["resources.data={nodes: 1, pool: gpu}"], "would occupy without using them"),
        (["resources.data={nodes: 1, pool: none}"], "resources.data.pool = 'none' is no pool"),
        (["data.ray_nodes={a: b}"], "have the labels {}"),
    ],
)
def test_data_nodes_that_cannot_be_are_refused(
    platform: Platform, settings: list[str], problem: str
) -> None:
    assert problem in refusal(digits("data.loader=ray", *settings), platform)
