"""The objects are valid for Kubernetes and for the pinned operator's CRDs."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.crd_schemas import (
    FILE_NAME,
    OPERATOR,
    PROMETHEUS,
    module_folder,
    write_kubernetes_schemas,
    write_prometheus_schemas,
    write_ray_schemas,
)
from tests.charts.helm_chart import CHART, Object, missing, need_tool, only, platform_of, render
from trainyard.diagnosis.probe import suspended_job
from trainyard.planning.merge import merge
from trainyard.planning.plan import plan_run
from trainyard.planning.render import render_job
from trainyard.platform import parse_platform
from trainyard.run_file.load import load_run
from trainyard.submission.run_folder.reader_pod import reader_pod

DIGITS = CHART.parents[1] / "examples/digits.yaml"
SUBJECTS = [{"kind": "Group", "name": "vision"}, {"kind": "ServiceAccount", "name": "ci"}]


@pytest.fixture(scope="session")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    operator = module_folder(OPERATOR)
    if operator is None:
        missing(f"the module {OPERATOR}, whose CRDs are the schema, is not in Go's module cache")
    target = tmp_path_factory.mktemp("schemas")
    assert "RayCluster" in write_ray_schemas(operator, target)
    if kubernetes := module_folder("k8s.io/kubernetes"):
        write_kubernetes_schemas(kubernetes, target)
    return target


def problems(objects: Iterable[Object], schemas: Path) -> str:
    """What kubeconform says against these objects; empty when they are valid."""
    check = subprocess.run(
        [need_tool("kubeconform"), "-strict", "-schema-location", f"{schemas}/{FILE_NAME}"],
        input=yaml.safe_dump_all(objects), text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert bool(check.returncode) == bool(check.stdout), check.stderr
    return check.stdout


def known(objects: Iterable[Object], schemas: Path) -> list[Object]:
    """The objects whose schemas are there: KubeRay's always, Kubernetes' own with its module."""
    return [one for one in objects if list(schemas.glob(f"{one['kind'].lower()}-*.json"))]


def of_platform(objects: list[Object]) -> list[Object]:
    """The objects that the launcher makes of the platform: RayJobs, their RayClusters, and the reader pod."""
    platform = parse_platform(yaml.safe_dump(platform_of(objects)), "test")
    plans = [
        plan_run(load_run(DIGITS, **resources), platform, "team")
        for resources in ({"workers": "2"}, {"gpus": "8"})
    ]
    jobs = [suspended_job(platform)]
    jobs += [merge(render_job(plan), platform, plan) for plan in plans]
    clusters = [
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayCluster",
            "metadata": {"name": "a"},
            "spec": job["spec"]["rayClusterSpec"],
        }
        for job in jobs
    ]
    return [*jobs, *clusters, reader_pod(platform, "digits")]


def test_objects_are_valid(objects: list[Object], schemas: Path) -> None:
    whole = known([*objects, *of_platform(objects)], schemas)
    assert {"RayCluster", "RayJob"} <= {one["kind"] for one in whole}
    assert problems(whole, schemas) == ""


def test_objects_are_valid_with_every_value_in_use(schemas: Path) -> None:
    toleration = {"key": "a", "operator": "Equal", "value": "b", "effect": "NoExecute"}
    place = {
        "nodeSelector": {"zone": "a"},
        "tolerations": [{**toleration, "tolerationSeconds": 60}],
    }
    objects = render(
        {
            "imagePullSecrets": [{"name": "registry"}],
            "security": {"tokenAuthentication": False},
            "storage": {"claim": {"storageClassName": "nfs"}},
            "pools": {"gpu": place, "cpu": {**place, "cpuRequest": 0.25}},
            "head": place,
            "rayCluster": {"enabled": True, "pool": "gpu"},
            "serviceAccount": {"annotations": {"cloud/role": "trainer"}},
            "launcher": {"rbac": {"subjects": SUBJECTS}},
        }
    )
    assert problems(known([*objects, *of_platform(objects)], schemas), schemas) == ""


def test_monitors_and_rules_are_valid(tmp_path: Path) -> None:
    prometheus = module_folder(PROMETHEUS)
    if prometheus is None:
        missing(
            f"the module {PROMETHEUS} is not in Go's module cache, see tests/charts/crds/go.mod"
        )
    assert write_prometheus_schemas(prometheus, tmp_path) == ["PodMonitor", "PrometheusRule"]
    enabled = {"enabled": True}
    objects = render({"monitoring": {"podMonitor": enabled, "prometheusRule": enabled}})
    made = [only(objects, kind) for kind in ("PodMonitor", "PrometheusRule")]
    assert problems(made, tmp_path) == ""
    made[0]["spec"]["podMetricsEndpoint"] = []
    assert "podMetricsEndpoint" in problems(made, tmp_path)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("headGroupSpec.templates", {}),
        ("headGroupSpec.template.spec.automountServiceAccountTokens", False),
        ("headGroupSpec.template.spec.terminationGracePeriodSeconds", "30"),
        ("authOptions.mode", "tokens"),
        ("workerGroupSpecs.0.replicas", 1.5),
        ("workerGroupSpecs.0.template.spec.containers.0.resources.limits.cpu", [2]),
    ],
)
def test_the_schemas_notice_a_mistake(
    on_claim: list[Object], schemas: Path, path: str, value: Any
) -> None:
    cluster = copy.deepcopy(only(on_claim, "RayCluster"))
    *parents, last = path.split(".")
    place: Any = cluster["spec"]
    for part in parents:
        place = place[int(part) if part.isdigit() else part]
    place[last] = value
    assert "is invalid" in problems([cluster], schemas)
