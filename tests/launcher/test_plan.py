"""One number in, exact numbers out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from trainyard.errors import ConfigError
from trainyard.planning.merge import merge
from trainyard.planning.plan import Plan, plan_run
from trainyard.planning.reasons import explain_plan
from trainyard.planning.render import render_job
from trainyard.platform import Platform
from trainyard.run_file.load import load_run
from trainyard.run_file.models import RunConfig

DIGITS = Path(__file__).resolve().parents[2] / "examples/digits.yaml"


def digits(*settings: str, gpus: str | None = None, workers: str | None = None) -> RunConfig:
    return load_run(DIGITS, settings, gpus=gpus, workers=workers)


def refusal(run: RunConfig, platform: Platform) -> str:
    with pytest.raises(ConfigError) as raised:
        plan_run(run, platform, "team")
    return str(raised.value)


@pytest.mark.parametrize(
    ("gpus", "nodes", "gpus_per_node"),
    [(1, 1, 1), (3, 1, 3), (7, 1, 7), (8, 1, 8), (16, 2, 8), (8192, 1024, 8)],
)
def test_gpus_become_a_share_of_a_node_or_whole_nodes(
    platform: Platform, gpus: int, nodes: int, gpus_per_node: int
) -> None:
    plan = plan_run(digits(f"train.global_batch_size={gpus * 4}", gpus=str(gpus)), platform, "team")
    assert (plan.nodes, plan.node.gpus, plan.workers, plan.gpus) == (
        nodes, gpus_per_node, gpus, gpus
    )  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2, 32])
def test_each_cpu_worker_has_a_pod_where_the_pool_holds_one(
    platform: Platform, workers: int
) -> None:
    plan = plan_run(digits(workers=str(workers)), platform, "team")
    assert (plan.nodes, plan.workers_per_node, plan.gpus) == (workers, 1, 0)


@pytest.mark.parametrize(
    ("gpus", "batch", "possible"),
    [
        (9, 64, "Use 8 or 16 GPUs"),
        (12, 48, "Use 8 or 16 GPUs"),
        (12, 60, "Use 6 GPUs"),
        (8191, 8184 * 1024, "Use 8184 or 8192 GPUs"),
        (9, 1, "Use 1 GPU with"),
    ],
)
def test_a_division_with_a_rest_names_the_next_possible_numbers(
    platform: Platform, gpus: int, batch: int, possible: str
) -> None:
    message = refusal(digits(f"train.global_batch_size={batch}", gpus=str(gpus)), platform)
    assert f"resources.gpus = {gpus} cannot be distributed over pool gpu with 8 GPUs" in message
    assert possible in message


def test_a_batch_that_cannot_be_shared_names_the_next_possible_numbers(
    platform: Platform,
) -> None:
    message = refusal(digits(gpus="24"), platform)
    assert "train.global_batch_size = 64 cannot be shared equally by 24 workers" in message
    assert "Use 16 or 32 GPUs with train.global_batch_size = 64 on pool gpu" in message


def test_a_part_of_a_node_takes_its_share_of_cpus_and_memory(platform: Platform) -> None:
    plan = plan_run(digits("train.global_batch_size=63", gpus="3"), platform, "team")
    assert (plan.node.cpu_limit_milli, plan.node.memory_mib) == (24_000, 180 * 1024)


def test_one_cpu_of_each_node_stays_for_data(platform: Platform) -> None:
    plan = plan_run(digits(gpus="8"), platform, "team")
    assert plan.cpus_per_worker == (64 - 1) // 8


def test_a_pool_without_a_cpu_for_data_is_refused(
    platform_with: Callable[..., Platform],
) -> None:
    message = refusal(digits(), platform_with(cpu={"cpus": 1, "cpuRequest": 1}))
    assert "pool cpu gives 1 CPU to a pod with 1 worker;" in message
    assert "at least 2 cpus" in message


def test_the_head_grows_with_the_workers(platform: Platform) -> None:
    def head_mib(workers: int) -> int:
        return plan_run(digits(workers=str(workers)), platform, "team").head.memory_mib

    assert head_mib(32) - head_mib(2) == 30 * platform.head.memory_mib_per_worker


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (digits("resources.pool=cpu", gpus="2"), "pool cpu has no GPUs"),
        (digits("resources.pool=gpu"), "CPU workers would occupy without using them"),
        (digits("resources.pool=tpu"), "'tpu' is no pool of the platform"),
        (digits("data.source=./mnist"), "is a relative path, which pods of a cluster cannot read"),
        (
            digits("train.init={path: w.pt}"),
            "is a relative path, which pods of a cluster cannot read",
        ),
        (digits("faults.replacement_timeout_s=49"), "set job.separateAttempts in the platform's"),
        (
            digits("faults.spares=1", gpus="8:16"),
            "faults.spares = 1, and resources.gpus = 8 to 16 is",
        ),
        (digits(workers="3"), "train.global_batch_size = 64 cannot be shared equally by 3 workers"),
    ],
)
def test_what_cannot_work_is_refused(platform: Platform, run: RunConfig, problem: str) -> None:
    assert problem in refusal(run, platform)


def test_a_run_need_not_wait_where_attempts_are_kept_apart(platform: Platform) -> None:
    apart = platform.job.model_copy(update={"separate_attempts": True})
    plan = plan_run(
        digits("faults.replacement_timeout_s=5"), platform.model_copy(update={"job": apart}), "team"
    )
    assert plan.trainer.faults.replacement_timeout_s == 5


def test_spare_nodes_have_no_workers_until_another_node_is_lost(platform: Platform) -> None:
    run = digits("faults.spares=1", gpus="16")
    plan = plan_run(run, platform, "team")
    assert (plan.nodes, plan.workers, plan.trainer.scaling.num_workers) == (2, 16, 16)
    (group,) = merge(render_job(plan), platform, plan)["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert {group[key] for key in ("replicas", "minReplicas", "maxReplicas")} == {3}
    rows = {row.name: row.value for row in explain_plan(plan, run, platform)}
    assert (rows["nodes"], rows["spare nodes"]) == ("2", "1")


def test_the_trainer_gets_the_numbers_of_the_plan(platform: Platform) -> None:
    trainer = plan_run(digits(gpus="16"), platform, "team").trainer
    assert (trainer.scaling.num_workers, trainer.scaling.use_gpu) == (16, True)
    assert trainer.scaling.cpus_per_worker == 7
    assert trainer.storage == platform.storage


@pytest.mark.parametrize(
    ("resource", "words"),
    [("nvidia.com/mig-1g.10gb", "partitions of GPUs"), ("nvidia.com/gpu", "nvidia.com/gpu")],
)
def test_parts_of_gpus_count_as_gpus(
    platform_with: Callable[..., Platform], resource: str, words: str
) -> None:
    platform = platform_with(gpu={"gpuResource": resource, "gpusPerNode": 7})
    run = digits("train.global_batch_size=70", gpus="14")
    plan = plan_run(run, platform, "team")
    assert (plan.nodes, plan.node.gpus, plan.gpu_resource) == (2, 7, resource)
    rows = {row.name: row.why for row in explain_plan(plan, run, platform)}
    assert words in rows["GPUs per node"]


def test_a_run_names_one_of_several_pools(platform: Platform) -> None:
    small = platform.pool("gpu").model_copy(update={"name": "small", "gpus_per_node": 4})
    spec = copy.deepcopy(platform.ray_cluster_spec)
    spec["workerGroupSpecs"].append({**platform.worker_group("gpu"), "groupName": "small"})
    several = platform.model_copy(
        update={"pools": (*platform.pools, small), "ray_cluster_spec": spec}
    )
    run = digits("train.global_batch_size=48", "resources.pool=small", gpus="12")
    assert plan_run(run, several, "team").nodes == 3
    default = digits("train.global_batch_size=48", gpus="12")
    assert "12 GPUs fit pool small: set resources.pool." in refusal(default, several)


def test_disk_is_shared_like_memory(platform_with: Callable[..., Platform]) -> None:
    platform = platform_with(gpu={"ephemeralStorageGib": 800})
    assert plan_run(digits(gpus="4"), platform, "team").node.disk_mib == 400 * 1024
    assert plan_run(digits(gpus="16"), platform, "team").node.disk_mib == 800 * 1024


@pytest.mark.parametrize(("memory_gib", "store_mib"), [(10, 3072), (480, 147456), (2048, 190734)])
def test_the_object_store_is_rays_own_share(
    platform_with: Callable[..., Platform], memory_gib: int, store_mib: int
) -> None:
    platform = platform_with(gpu={"memoryGib": memory_gib})
    assert plan_run(digits(gpus="8"), platform, "team").node.object_store_mib == store_mib


@pytest.mark.parametrize(("gpus", "cpus", "memory_gib"), [(1, 2, 4), (512, 3, 8), (8192, 18, 68)])
def test_the_head_suits_the_number_of_workers(
    platform: Platform, gpus: int, cpus: int, memory_gib: int
) -> None:
    run = digits("train.global_batch_size=8192", gpus=str(gpus))
    head = plan_run(run, platform, "team").head
    assert (head.cpu_limit_milli // 1000, head.memory_mib // 1024) == (cpus, memory_gib)


def test_every_number_has_a_reason(platform: Platform) -> None:
    run = digits(gpus="16")
    plan: Plan = plan_run(run, platform, "team")
    rows = {row.name: row for row in explain_plan(plan, run, platform)}
    assert all(row.why for row in rows.values())
    assert (rows["nodes"].value, rows["workers"].value) == ("2", "16")
    assert rows["nodes"].why == "16 GPUs / 8 per node"
    assert rows["batch per worker"].value == "4"
