"""The chart as helm renders it, parsed; and the tools for that."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "trainyard"
NAMESPACE = "team-vision"
KUBERNETES = "1.34.4"
RAY_APIS = ("ray.io/v1/RayJob", "ray.io/v1/RayCluster")
KUEUE_APIS = tuple(
    f"kueue.x-k8s.io/{version}/{kind}"
    for version in ("v1beta1", "v1beta2")
    for kind in ("LocalQueue", "Topology", "WorkloadPriorityClass")
)
MONITORING_APIS = tuple(
    f"monitoring.coreos.com/v1/{kind}" for kind in ("PodMonitor", "PrometheusRule")
)
ALL_APIS = RAY_APIS + KUEUE_APIS + MONITORING_APIS
S3_STORAGE = {
    "claim": None,
    "s3": {"path": "s3://models/vision", "endpoint": "http://minio:9000", "secretName": "bucket"},
}

Object = dict[str, Any]


def cluster_bin() -> Path:
    """Where the test cluster keeps the tools that it built."""
    home = os.environ.get("TRAINYARD_CLUSTER_HOME") or Path.home() / ".cache/trainyard/cluster"
    return Path(home) / "bin"


def find_tool(name: str) -> Path | None:
    found = shutil.which(name) or shutil.which(name, path=str(cluster_bin()))
    return Path(found) if found else None


def missing(what: str) -> NoReturn:
    """Skip the test on a laptop, fail it where CI is set."""
    if os.environ.get("CI"):
        pytest.fail(f"{what}, and CI must not skip this")
    pytest.skip(what)


def need_tool(name: str) -> Path:
    tool = find_tool(name)
    if tool is None:
        missing(f"{name} is neither on PATH nor in {cluster_bin()}")
    return tool


def run_helm(
    values: Mapping[str, Any],
    apis: Iterable[str] = ALL_APIS,
    chart: Path = CHART,
    presets: Iterable[Path] = (),
    kubernetes: str = KUBERNETES,
) -> subprocess.CompletedProcess[str]:
    command = [str(need_tool("helm")), "template", "trainyard", str(chart)]
    command += ["--namespace", NAMESPACE, "--kube-version", kubernetes]
    for api in apis:
        command += ["--api-versions", api]
    for preset in presets:
        command += ["--values", str(preset)]
    return subprocess.run(
        [*command, "--values", "-"], input=json.dumps(dict(values)), text=True,
        capture_output=True, check=False,
    )  # fmt: skip


def render(
    values: Mapping[str, Any],
    apis: Iterable[str] = ALL_APIS,
    presets: Iterable[Path] = (),
    chart: Path = CHART,
) -> list[Object]:
    """Return the objects that helm renders from the chart with these values, which replace those of
    presets."""
    rendered = run_helm(values, apis, chart, presets)
    assert rendered.returncode == 0, rendered.stderr
    documents = yaml.load_all(rendered.stdout, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return [parsed for parsed in documents if parsed]


def refusal(
    values: Mapping[str, Any], apis: Iterable[str] = ALL_APIS, kubernetes: str = KUBERNETES
) -> str:
    """What helm says when it refuses these values; fails when it does not."""
    rendered = run_helm(values, apis, kubernetes=kubernetes)
    assert rendered.returncode != 0, "helm accepted these values"
    return rendered.stderr


def only(objects: Iterable[Object], kind: str) -> Object:
    """The one object of this kind."""
    (found,) = [one for one in objects if one["kind"] == kind]
    return found


def of_kind(objects: Iterable[Object], kind: str) -> dict[str, Object]:
    """The objects of this kind by name."""
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def platform_of(objects: Iterable[Object]) -> Object:
    """What the launcher reads."""
    config_map = of_kind(objects, "ConfigMap")["trainyard-platform"]
    published: Object = yaml.safe_load(config_map["data"]["platform.yaml"])
    return published


def pods_of(objects: list[Object]) -> dict[str, Object]:
    """Each pod, or pod template, that comes from the chart; by where it stands."""
    platform = platform_of(objects)
    specs = {"platform": platform["rayClusterSpec"]}
    for standing in (one for one in objects if one["kind"] == "RayCluster"):
        specs["standing"] = standing["spec"]
    pods = {"reader": platform["readerPod"]}
    pods |= of_kind(objects, "Pod")
    for name, daemons in of_kind(objects, "DaemonSet").items():
        pods[name] = daemons["spec"]["template"]
    for name, cron in of_kind(objects, "CronJob").items():
        pods[name] = cron["spec"]["jobTemplate"]["spec"]["template"]
    for place, spec in specs.items():
        pods[f"{place} head"] = spec["headGroupSpec"]["template"]
        for group in spec["workerGroupSpecs"]:
            pods[f"{place} {group['groupName']}"] = group["template"]
    return pods


def environment(pod: Object) -> Object:
    """The environment of a pod's first container: name -> value, or where it comes from."""
    variables = pod["spec"]["containers"][0]["env"]
    assert len({one["name"] for one in variables}) == len(variables)
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in variables}
