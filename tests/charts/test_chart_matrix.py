"""Any mixture of values renders to objects that are valid for Kubernetes 1.29 to 1.34."""

from __future__ import annotations

import copy
import json
from itertools import combinations
from typing import Any

import pytest

from tests.charts.helm_chart import Object, of_kind, only, pods_of, render
from tests.charts.kubernetes_versions import VERSIONS, as_objects, is_known, problems
from tests.charts.pod_security import violations
from trainyard.platform import parse_platform

Values = dict[str, Any]

PLACE = {
    "nodeSelector": {"zone": "a"},
    "tolerations": [{"key": "a", "operator": "Equal", "value": "b", "effect": "NoExecute"}],
}
SPOT = {"nodeSelector": {"capacity": "spot", "kind": "cheap"}, "tolerations": PLACE["tolerations"]}
RULES = {"egress": [{"cidrs": ["10.0.0.0/8"], "ports": [443]}], "ingress": [{"namespaces": ["a"]}]}
KUEUE = {"clusterQueue": "vision", "nodes": {"gpu": 4, "cpu": 1}}
PRIORITIES = [{"name": "urgent", "value": 10, "description": "Deadlines."}]
SUBJECTS = [{"kind": "Group", "name": "vision"}, {"kind": "ServiceAccount", "name": "ci"}]

FACTORS: dict[str, tuple[Values, ...]] = {
    "storage": (
        {},
        {"storage": {"claim": {"keep": False, "storageClassName": "nfs"}}},
        {"storage": {"claim": {"create": False, "name": "theirs"}}},
        {"storage": {"claim": None, "s3": {"path": "s3://models", "secretName": "bucket"}}},
        {"storage": {"claim": None, "s3": {"path": "s3://models", "endpoint": "http://minio"}}},
    ),
    "pools": (
        {},
        {
            "pools": {
                "gpu": {
                    **PLACE,
                    "network": {"preset": "efa"},
                    "ephemeralStorageGib": 9,
                    "gpuMemoryGib": 80,
                }
            }
        },
        {"pools": {"gpu": {"gpuResource": "nvidia.com/mig-1g.5gb"}, "cpu": {"cpuRequest": 0.25}}},
        {"pools": {"gpu": {**PLACE, "spot": True, "topologyKey": "a.b/zone"}}, "spot": SPOT},
    ),
    "queue": (
        {},
        {"queue": {"system": "kueue", "name": "runs", "kueue": KUEUE}},
        {"queue": {"system": "kueue", "name": "runs"}, "priorityClasses": PRIORITIES},
        {"queue": {"system": "volcano", "name": "runs"}, "priorityClasses": PRIORITIES},
    ),
    "network": (
        {},
        {"security": {"networkPolicy": {"enabled": True, "apiServerCidrs": ["10.0.0.1/32"]}}},
        {
            "security": {
                "networkPolicy": {
                    "enabled": True,
                    "storageCidrs": ["10.1.0.0/16"],
                    "apiServerCidrs": ["10.0.0.1/32"],
                    **RULES,
                }
            },
            "elastic": {"enabled": False},
        },
    ),
    "notify": (
        {},
        {"notify": {"secret": {"name": "chat", "key": "url"}, "watch": {"enabled": True}}},
        {"notify": {"url": "https://hooks.example.com/runs", "outcomes": ["failed"]}},
    ),
    "monitoring": (
        {},
        {
            "monitoring": {
                "podMonitor": {"enabled": True},
                "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
                "progress": {"enabled": True},
                "dashboards": {"enabled": True},
            }
        },
    ),
    "standing": ({}, {"rayCluster": {"enabled": True, "pool": "gpu", "replicas": 2}}),
    "image": ({}, {"prePull": {"enabled": True}, "imagePullSecrets": [{"name": "registry"}]}),
    "limits": (
        {},
        {
            "quotas": {
                "hard": {"pods": "9"},
                "limitRange": {"default": {"cpu": "1", "memory": "1Gi"}},
            }
        },
    ),
    "people": (
        {},
        {"launcher": {"rbac": {"subjects": SUBJECTS}, "clusterRbac": {"create": True}}},
        {"launcher": {"rbac": {"create": False}}, "serviceAccount": {"create": False}},
    ),
    "rest": (
        {},
        {"test": {"gpus": True}, "disruptionBudget": {"heads": True}, "head": PLACE},
        {"operator": {"version": "1.7"}, "test": {"gpus": True}},
        {"job": {"separateAttempts": True}},
    ),
}


def pairwise(factors: dict[str, tuple[Values, ...]]) -> list[dict[str, int]]:
    """Mixtures such that any two choices of two factors occur together in one of them."""
    open_pairs = {
        frozenset({(a, i), (b, j)})
        for a, b in combinations(factors, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    mixtures = []
    while open_pairs:
        mixture = dict(min(open_pairs, key=sorted))
        for name in factors:
            if name not in mixture:
                mixture[name] = max(
                    range(len(factors[name])),
                    key=lambda choice: sum(
                        frozenset({(name, choice), other}) in open_pairs
                        for other in mixture.items()
                    ),
                )
        mixtures.append(mixture)
        open_pairs -= {frozenset(pair) for pair in combinations(mixture.items(), 2)}
    return mixtures


def values_of(mixture: dict[str, int]) -> Values:
    values: Values = {}
    for name, choice in mixture.items():
        assert not values.keys() & FACTORS[name][choice].keys(), name
        values |= FACTORS[name][choice]
    return values


@pytest.fixture(scope="module")
def renderings() -> list[list[Object]]:
    return [render(values_of(mixture)) for mixture in pairwise(FACTORS)]


@pytest.fixture(scope="module")
def distinct(renderings: list[list[Object]]) -> list[Object]:
    """Each different object of all renderings, once; also the pods that lie in the platform."""
    found = {
        json.dumps(one, sort_keys=True): one
        for objects in renderings
        for one in [*objects, *as_objects(pods_of(objects))]
    }
    return list(found.values())


def test_the_mixtures_hold_every_pair_of_choices():
    mixtures = pairwise(FACTORS)
    assert len(mixtures) < 40
    for a, b in combinations(FACTORS, 2):
        held = {(mixture[a], mixture[b]) for mixture in mixtures}
        assert len(held) == len(FACTORS[a]) * len(FACTORS[b])


@pytest.mark.ci
def test_every_kind_of_the_chart_is_in_a_mixture(distinct):
    assert {one["kind"] for one in distinct} == {
        "ClusterQueue", "ClusterRole", "ClusterRoleBinding", "ConfigMap", "CronJob", "DaemonSet",
        "LimitRange", "LocalQueue", "NetworkPolicy", "PersistentVolumeClaim", "Pod", "PodDisruptionBudget",
        "PodMonitor", "PriorityClass", "PrometheusRule", "RayCluster", "ResourceFlavor",
        "ResourceQuota", "Role", "RoleBinding", "ServiceAccount", "Topology", "WorkloadPriorityClass",
    }  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_for(version, distinct):
    own = [one for one in distinct if is_known(one)]
    assert len(own) > 100
    assert [problem for one in own for problem in problems(one, version)] == []


def test_every_pod_is_restricted(distinct):
    pods = [one for one in distinct if one["kind"] == "Pod"]
    assert {
        pod["metadata"]["name"]: violations(pod["spec"]) for pod in pods if violations(pod["spec"])
    } == {}


def test_the_launcher_reads_every_platform(renderings):
    for objects in renderings:
        config_map = of_kind(objects, "ConfigMap")["trainyard-platform"]
        assert parse_platform(config_map["data"]["platform.yaml"], "test").pools


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("NetworkPolicy", "spec.egres", []),
        ("NetworkPolicy", "spec.ingress.0.ports", [{"port": {}}]),
        ("PodDisruptionBudget", "spec.minAvailable", {}),
        ("DaemonSet", "spec.template.spec.containers.0.imagePullPolicys", "Always"),
        ("Pod", "spec.restartPolicy", 3),
    ],
)
def test_the_schemas_notice_a_mistake(kind, path, value):
    values = {"disruptionBudget": {"heads": True}, "prePull": {"enabled": True, "pools": ["cpu"]}}
    one = copy.deepcopy(only(render(values | FACTORS["network"][2]), kind))
    *parents, last = path.split(".")
    place: Any = one
    for part in parents:
        place = place[int(part) if part.isdigit() else part]
    place[last] = value
    for version in VERSIONS:
        assert problems(one, version), version


def test_the_namespace_is_made_with_its_level_and_stays():
    values = {"security": {"namespace": {"create": True, "podSecurity": "baseline"}}}
    namespace = only(render(values), "Namespace")
    assert namespace["metadata"]["name"] == "team-vision"
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "baseline"
    assert namespace["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert [problem for version in VERSIONS for problem in problems(namespace, version)] == []
