"""The network block: variables and devices of worker pods, and nothing of it elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import ConfigError
from trainyard.planning.merge import merge
from trainyard.planning.plan import plan_run
from trainyard.planning.reasons import explain_plan
from trainyard.planning.render import render_job
from trainyard.platform import Platform
from trainyard.run_file.load import load_run
from trainyard.run_file.network import Network, merge_networks
from trainyard_trainer.run_files import submission

DIGITS = Path(__file__).resolve().parents[2] / "examples/digits.yaml"
RDMA = "network.resource=rdma/hca_shared_devices_a"


def containers_of(
    platform: Platform, *settings: str, gpus: str | None = "16", workers: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of head and worker."""
    plan = plan_run(load_run(DIGITS, settings, gpus=gpus, workers=workers), platform, "team")
    spec = merge(render_job(plan), platform, plan)["spec"]["rayClusterSpec"]
    head, worker = (
        group["template"]["spec"]["containers"][0]
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])
    )
    return head, worker


def added_by(platform: Platform, *settings: str, **resources: str) -> tuple[dict, dict]:  # type: ignore[type-arg]
    """Variables and resources that a network block adds to a worker."""
    _, plain = containers_of(platform, **resources)
    _, worker = containers_of(platform, *settings, **resources)
    assert worker["resources"]["requests"].keys() == worker["resources"]["limits"].keys()
    environment = {one["name"]: one["value"] for one in worker["env"] if one not in plain["env"]}
    limits = worker["resources"]["limits"].items() - plain["resources"]["limits"].items()
    assert limits <= worker["resources"]["requests"].items()
    return environment, dict(limits)


@pytest.mark.parametrize(
    ("settings", "environment", "devices"),
    [
        (["network.preset=tcp"], {"NCCL_DEBUG": "WARN", "NCCL_IB_DISABLE": "1"}, {}),
        (
            ["network.preset=tcp", "network.interface=eth0", "network.debug=true"],
            {
                "NCCL_DEBUG": "INFO",
                "NCCL_DEBUG_SUBSYS": "INIT,NET",
                "NCCL_IB_DISABLE": "1",
                "NCCL_SOCKET_IFNAME": "eth0",
                "GLOO_SOCKET_IFNAME": "eth0",
            },
            {},
        ),
        (
            ["network.preset=tcp", "network.interface=^lo,docker0"],
            {"NCCL_DEBUG": "WARN", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "^lo,docker0"},
            {},
        ),
        (
            ["network.preset=infiniband", RDMA, "network.devices_per_node=8"],
            {"NCCL_DEBUG": "WARN", "NCCL_NET": "IB"},
            {"rdma/hca_shared_devices_a": "8"},
        ),
        (
            ["network.preset=roce", RDMA],
            {"NCCL_DEBUG": "WARN", "NCCL_NET": "IB", "NCCL_IB_ROCE_VERSION_NUM": "2"},
            {"rdma/hca_shared_devices_a": "1"},
        ),
        (
            ["network.preset=efa", "network.devices_per_node=32"],
            {
                "NCCL_DEBUG": "WARN",
                "FI_PROVIDER": "efa",
                "FI_EFA_USE_DEVICE_RDMA": "1",
                "FI_EFA_FORK_SAFE": "1",
            },
            {"vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "5120Mi"},
        ),
    ],
)
def test_each_preset_is_its_variables_and_devices(
    platform: Platform, settings: list[str], environment: dict[str, str], devices: dict[str, str]
) -> None:
    assert added_by(platform, *settings) == (environment, devices)


def test_the_head_is_left_as_it_was(platform: Platform) -> None:
    head, _ = containers_of(platform, "network.preset=efa")
    plain, _ = containers_of(platform)
    for container in (head, plain):
        container["env"] = [v for v in container["env"] if v["name"] != submission.VARIABLE]
    assert head == plain


@pytest.mark.parametrize("gpus", ["1", "4", "8"])
def test_a_run_on_one_node_takes_no_devices(platform: Platform, gpus: str) -> None:
    assert added_by(platform, "network.preset=efa", gpus=gpus) == ({"NCCL_DEBUG": "WARN"}, {})
    run = load_run(DIGITS, ["network.preset=efa"], gpus=gpus)
    rows = {row.name: row for row in explain_plan(plan_run(run, platform, "team"), run, platform)}
    assert "no devices, because the run has one node" in rows["network"].why


INFINIBAND = {"preset": "infiniband", "resource": "rdma/hca_shared_devices_a", "devicesPerNode": 4}


@pytest.mark.parametrize(
    ("pool", "settings", "environment", "devices"),
    [
        (None, ["network.debug=true"], {"NCCL_DEBUG": "INFO"}, {}),
        (
            None,
            ["network.interface=eth0"],
            {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "eth0"},
            {},
        ),
        (
            INFINIBAND,
            ["network.debug=true"],
            {"NCCL_DEBUG": "INFO", "NCCL_NET": "IB"},
            {"rdma/hca_shared_devices_a": "4"},
        ),
        (
            INFINIBAND,
            ["network.preset=infiniband", "network.debug=true"],
            {"NCCL_DEBUG": "INFO", "NCCL_NET": "IB"},
            {"rdma/hca_shared_devices_a": "4"},
        ),
        (
            INFINIBAND | {"interface": "eth0", "debug": True},
            ["network.devices_per_node=8", "network.debug=false"],
            {"NCCL_DEBUG": "WARN", "NCCL_NET": "IB", "NCCL_SOCKET_IFNAME": "eth0"},
            {"rdma/hca_shared_devices_a": "8"},
        ),
        (
            INFINIBAND,
            ["network.preset=roce"],
            {"NCCL_NET": "IB", "NCCL_IB_ROCE_VERSION_NUM": "2"},
            {"rdma/hca_shared_devices_a": "4"},
        ),
        (
            INFINIBAND | {"interface": "eth0", "debug": True},
            ["network.preset=tcp"],
            {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth0"},
            {},
        ),
        (
            INFINIBAND,
            ["network.preset=efa"],
            {"FI_PROVIDER": "efa"},
            {"vpc.amazonaws.com/efa": "1", "hugepages-2Mi": "5120Mi"},
        ),
        (
            {"preset": "efa", "devicesPerNode": 32},
            ["network.debug=true"],
            {"NCCL_DEBUG": "INFO", "FI_PROVIDER": "efa"},
            {"vpc.amazonaws.com/efa": "32", "hugepages-2Mi": "5120Mi"},
        ),
    ],
)
def test_the_runs_fields_replace_those_of_the_pool_one_by_one(
    platform_with: Callable[..., Platform],
    pool: dict[str, Any] | None,
    settings: list[str],
    environment: dict[str, str],
    devices: dict[str, str],
) -> None:
    _, worker = containers_of(platform_with(gpu={"network": pool}), *settings)
    variables = {one["name"]: one["value"] for one in worker["env"]}
    assert environment.items() <= variables.items()
    assert ("NCCL_IB_DISABLE" in variables) == ("network.preset=tcp" in settings)
    requests = worker["resources"]["requests"]
    assert {name: requests[name] for name in requests.keys() - KNOWN} == devices


KNOWN = {"cpu", "memory", "nvidia.com/gpu"}


@pytest.mark.parametrize(
    ("pool", "settings", "message"),
    [
        (None, ["network.preset=infiniband"], "infiniband needs network.resource"),
        ({"preset": "efa"}, ["network.preset=roce"], "roce needs network.resource"),
        (None, [RDMA], "network.preset is not set"),
        ({"preset": "tcp"}, ["network.devices_per_node=2"], "network.preset is tcp"),
    ],
)
def test_a_combination_with_the_pool_that_cannot_work_is_refused(
    platform_with: Callable[..., Platform],
    pool: dict[str, Any] | None,
    settings: list[str],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        containers_of(platform_with(gpu={"network": pool}), *settings)


@pytest.mark.parametrize("preset", ["infiniband", "roce"])
def test_a_pool_with_rdma_names_its_devices(
    platform_with: Callable[..., Platform], preset: str
) -> None:
    with pytest.raises(ConfigError, match=f"the preset {preset} needs resource"):
        platform_with(gpu={"network": {"preset": preset}})
    with pytest.raises(ConfigError, match="preset"):
        platform_with(gpu={"network": {"debug": True}})


def test_a_submission_that_is_planned_again_keeps_to_its_pool(
    platform_with: Callable[..., Platform],
) -> None:
    """What the submission records of `network` holds no defaults that would replace the pool's fields."""
    platform = platform_with(gpu={"network": INFINIBAND | {"debug": True}})
    plan = plan_run(load_run(DIGITS, ["network.interface=eth0"], gpus="16"), platform, "team")
    recorded = Network.model_validate(plan.launch["network"])
    assert merge_networks(recorded, platform.pool("gpu").network) == plan.network


def test_the_plan_says_which_fields_come_from_the_run(
    platform_with: Callable[..., Platform],
) -> None:
    platform = platform_with(gpu={"network": INFINIBAND})
    run = load_run(DIGITS, ["network.debug=true"], gpus="16")
    rows = {row.name: row for row in explain_plan(plan_run(run, platform, "team"), run, platform)}
    assert rows["network"].value == "infiniband"
    assert rows["network"].why == (
        "from pool gpu, with debug of the run file; 4 rdma/hca_shared_devices_a per node"
    )


def test_a_variable_of_the_shape_gives_way(platform: Platform) -> None:
    shape = platform.model_copy(deep=True).ray_cluster_spec
    for group in shape["workerGroupSpecs"]:
        group["template"]["spec"]["containers"][0]["env"].append(
            {"name": "NCCL_DEBUG", "value": "TRACE"}
        )
    changed = platform.model_copy(update={"ray_cluster_spec": shape})
    _, worker = containers_of(changed, "network.preset=tcp")
    assert [one["value"] for one in worker["env"] if one["name"] == "NCCL_DEBUG"] == ["WARN"]


@pytest.mark.parametrize("preset", ["tcp", "infiniband", "roce", "efa"])
def test_pods_stay_within_pod_security_restricted(platform: Platform, preset: str) -> None:
    rdma = [RDMA] if preset in ("infiniband", "roce") else []
    _, worker = containers_of(platform, f"network.preset={preset}", *rdma)
    _, plain = containers_of(platform)
    for key in ("securityContext", "volumeMounts", "ports"):
        assert worker.get(key) == plain.get(key)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["network.preset=tcp", RDMA], "the preset tcp uses no devices"),
        (["network.preset=tcp", "network.devices_per_node=2"], "the preset tcp uses no devices"),
        (["network.preset=ethernet"], "must be 'tcp', 'infiniband', 'roce' or 'efa'"),
        (["network.preset=tcp", "network.interface='eth0; ls'"], r"network\.interface"),
        (["network.preset=efa", "network.resource=efa"], r"network\.resource"),
    ],
)
def test_a_block_that_makes_no_sense_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run(DIGITS, settings, gpus="16")


def test_rdma_between_cpu_workers_is_refused(platform: Platform) -> None:
    with pytest.raises(ConfigError, match="CPU workers communicate with gloo") as raised:
        containers_of(platform, "network.preset=efa", gpus=None, workers="2")
    assert "preset tcp" in str(raised.value)
