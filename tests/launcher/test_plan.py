"""One number in, exact numbers out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.config import RunConfig, load_run
from launcher.errors import ConfigError
from launcher.plan import Plan, explain_plan, plan_run
from launcher.platform import Platform

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
    assert f"resources.gpus = {gpus} cannot be spread over pool gpu with 8 GPUs" in message
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
        (digits("resources.pool=gpu"), "CPU workers would hold without using them"),
        (digits("resources.pool=tpu"), "'tpu' is no pool of the platform"),
        (digits("data.source=./mnist"), "is a path of this machine, which a cluster's pods do not"),
        (digits(workers="3"), "train.global_batch_size = 64 cannot be shared equally by 3 workers"),
    ],
)
def test_what_cannot_work_is_refused(platform: Platform, run: RunConfig, problem: str) -> None:
    assert problem in refusal(run, platform)


def test_the_trainer_gets_the_numbers_of_the_plan(platform: Platform) -> None:
    trainer = plan_run(digits(gpus="16"), platform, "team").trainer
    assert (trainer.scaling.num_workers, trainer.scaling.use_gpu) == (16, True)
    assert trainer.scaling.cpus_per_worker == 7
    assert trainer.storage == platform.storage


def test_every_number_has_a_reason(platform: Platform) -> None:
    run = digits(gpus="16")
    plan: Plan = plan_run(run, platform, "team")
    rows = {row.name: row for row in explain_plan(plan, run, platform)}
    assert all(row.why for row in rows.values())
    assert (rows["nodes"].value, rows["workers"].value) == ("2", "16")
    assert rows["nodes"].why == "16 GPUs / 8 per node, exactly"
    assert rows["batch per worker"].value == "4"
