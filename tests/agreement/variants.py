"""Every kind of RayJob that the launcher renders: queue systems, resources, networks, releases of KubeRay."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import yaml

from tests.golden.golden import PLATFORM, ROOT
from trainyard.planning.objects import run_objects
from trainyard.platform import Platform, parse_platform
from trainyard.run_file.load import load_run
from trainyard.run_file.models import RunConfig

DIGITS = ROOT / "examples/digits.yaml"
RDMA = "network.resource=rdma/hca_shared_devices_a"

Object = dict[str, Any]

SYSTEMS: dict[str, Object] = {
    "none": {},
    **{
        system: {"queue": {"system": system, "name": "team"}}
        for system in ("kueue", "volcano", "yunikorn", "kai")
    },
}
RUNS: dict[str, tuple[dict[str, str], list[str]]] = {
    "workers": ({"workers": "2"}, []),
    "one-node": ({"gpus": "4"}, []),
    "nodes": ({"gpus": "16"}, []),
    "tcp": ({"gpus": "16"}, ["network.preset=tcp", "network.interface=eth0"]),
    "infiniband": ({"gpus": "16"}, ["network.preset=infiniband", RDMA]),
    "roce": ({"gpus": "16"}, ["network.preset=roce", RDMA]),
    "efa": ({"gpus": "16"}, ["network.preset=efa", "network.devices_per_node=32"]),
    "elastic": ({"gpus": "8:16"}, []),
    "data-nodes": ({"gpus": "16"}, ["data.loader=ray", "resources.data.nodes=2"]),
}
VARIANTS = [
    (system, run, kuberay)
    for system, run, kuberay in itertools.product(SYSTEMS, RUNS, ("1.6", "1.7"))
    if not (system == "kueue" and run == "elastic")  # refused: Kueue admits no autoscaling
]


@cache
def platform_of(system: str, kuberay: str) -> Platform:
    changes = {**SYSTEMS[system], "kuberay": kuberay}
    return parse_platform(yaml.safe_dump(yaml.safe_load(PLATFORM.read_text()) | changes), "test")


@cache
def run_of(name: str) -> RunConfig:
    resources, settings = RUNS[name]
    return load_run(DIGITS, settings, **resources)


def rendered(system: str, run: str, kuberay: str, namespace: str = "team") -> Object:
    return run_objects(run_of(run), platform_of(system, kuberay), namespace).job
