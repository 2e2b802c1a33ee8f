"""The capacity of nodes and its users on a real API server: `trainyard gpus` and `plan --from-cluster`.

The node of these tests does not exist, and no other pod tolerates its taint. A pod that is assigned to it
holds its GPUs whether it runs or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Ended, Team, kubectl

DIGITS = "examples/digits.yaml"
NODE = "trainyard-e2e-capacity"
TAINT = {"key": NODE, "value": "true", "effect": "NoSchedule"}
POOL = {
    "gpusPerNode": 4,
    "gpuResource": "nvidia.com/gpu",
    "cpus": 8,
    "memoryGib": 8,
    "nodeSelector": {NODE: "true"},
    "tolerations": [{"key": NODE, "operator": "Exists"}],
}
SUBJECT = {"kind": "ServiceAccount", "name": "ada"}


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("capacity")
    folder = tmp_path_factory.mktemp("values")
    team.install(folder, pools__big=POOL, launcher__rbac__subjects=[SUBJECT])
    return team


@pytest.fixture(scope="module")
def node() -> Iterator[str]:
    """A node with 8 free GPUs."""
    sizes = {"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": "8"}
    create(
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": NODE, "labels": {NODE: "true"}},
            "spec": {"taints": [TAINT]},
        }
    )
    status = {
        "capacity": sizes,
        "allocatable": sizes,
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    kubectl(
        *("patch", "node", NODE, "--subresource=status", "--type=merge"),
        *("--patch", json.dumps({"status": status})),
    )
    yield NODE
    kubectl("delete", "node", NODE)


@pytest.fixture
def holder(team: Team, node: str) -> Iterator[str]:
    """A pod of the run `photos` that holds 6 GPUs of the node."""
    size = {"nvidia.com/gpu": "6"}
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "holder",
                "namespace": team.namespace,
                "labels": {"trainyard.io/run": "photos"},
            },
            "spec": {
                "nodeName": node,
                "tolerations": [{"operator": "Exists"}],
                "terminationGracePeriodSeconds": 0,
                "containers": [
                    {
                        "name": "main",
                        "image": team.image,
                        "securityContext": security,
                        "resources": {"requests": size, "limits": size},
                    }
                ],
            },
        }
    )
    yield "holder"
    kubectl("delete", "pod", "holder", "-n", team.namespace, "--force", "--grace-period=0")


def create(body: dict[str, Any]) -> None:
    kubectl("create", "-f", "-", stdin=json.dumps(body))


def plan(team: Team, gpus: str, **environment: str) -> Ended:
    return team.trainyard(
        *("plan", DIGITS, "--from-cluster", "--gpus", gpus, "--set", "resources.pool=big"),
        "--json",
        **environment,
    )


def free_now(ended: Ended) -> tuple[str, str]:
    assert ended.returncode == 0, ended.stderr
    rows = {row["name"]: row for row in json.loads(ended.stdout)}
    return rows["free now: big"]["value"], rows["free now: big"]["why"]


def test_gpus_are_shown_with_pool_run_and_pod(team: Team, node: str, holder: str) -> None:
    found = json.loads(team.trainyard("gpus", "--json").stdout)
    (one,) = [one for one in found["nodes"] if one["node"] == node]
    assert one == {
        "node": node,
        "pools": ["big"],
        "resource": "nvidia.com/gpu",
        "total": 8,
        "used": 6,
        "free": 2,
        "open": True,
        "holders": [
            {"namespace": team.namespace, "pod": holder, "run": "photos", "gpus": 6}
            | {"phase": "Pending"}
        ],
    }
    assert {"pool": "big", "resource": "nvidia.com/gpu", "nodes": 1} | {
        "total": 8,
        "used": 6,
        "free": 2,
    } in found["pools"]
    table = team.trainyard("gpus").stdout
    assert f"run photos ({team.namespace}/holder): 6 Pending" in table


def test_an_idle_node_has_room_for_a_run(team: Team, node: str) -> None:
    value, why = free_now(plan(team, "8"))
    assert value == "2 of 2 pods"
    assert "1 node may run these pods, and 2 would fit if nothing else ran" in why


def test_a_busy_node_is_no_error(team: Team, holder: str) -> None:
    value, why = free_now(plan(team, "8"))
    assert value == "0 of 2 pods"
    assert "too little nvidia.com/gpu is free now: the run waits" in why


def test_what_no_node_could_ever_hold_is_an_error(team: Team, node: str) -> None:
    ended = plan(team, "16")
    assert ended.returncode == 2
    assert "the run does not fit on the nodes of the cluster: big needs 4 pods with" in ended.stderr
    assert "and 2 would fit if nothing else ran" in ended.stderr


def test_who_may_not_list_nodes_is_told_and_plans_by_the_platform(
    team: Team, node: str, tmp_path: Path
) -> None:
    create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account(team)})
    environment = {"KUBECONFIG": str(kubeconfig_of(team, tmp_path))}
    planned = plan(team, "8", **environment)
    assert planned.returncode == 0, planned.stderr
    assert "nodes are not checked: you have no right to list the nodes" in planned.stderr
    assert [row["value"] for row in json.loads(planned.stdout) if row["name"] == "nodes"] == ["2"]
    refused = team.trainyard("gpus", **environment)
    assert refused.returncode == 3
    assert "launcher.clusterRbac.create" in refused.stderr


def account(team: Team) -> dict[str, str]:
    return {"name": SUBJECT["name"], "namespace": team.namespace}


def kubeconfig_of(team: Team, folder: Path) -> Path:
    """Return a kubeconfig with the token of the account that has the launcher's Role."""
    config = yaml.safe_load(kubectl("config", "view", "--raw", "--minify", "--flatten"))
    token = kubectl("create", "token", SUBJECT["name"], "-n", team.namespace).strip()
    config["users"][0]["user"] = {"token": token}
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return file
