"""On which nodes pods run: spot pools, and packing by a label of nodes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.helm_chart import Object, of_kind, only, pods_of, render
from tests.charts.kubernetes_versions import VERSIONS, as_objects, problems

MACHINE = {"machine": "p5"}
SPOT = {
    "nodeSelector": {"capacity": "spot"},
    "tolerations": [{"key": "capacity", "operator": "Exists", "effect": "NoSchedule"}],
}
GPU = {"gpusPerNode": 8, "cpus": 64, "memoryGib": 480, "nodeSelector": MACHINE}
POOLS = {"gpu": GPU, "gpu-spot": {**GPU, "spot": True}}
OFF_SPOT = [{"key": "capacity", "operator": "NotIn", "values": ["spot"]}]
ZONES = [
    {"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in "ab"
]
KUEUE = {"system": "kueue", "name": "runs"}
ALL = {"rayCluster": {"enabled": True}, "prePull": {"enabled": True}, "test": {"gpus": True}}


def node_terms(pod: Object) -> Any:
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    return affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get(
        "nodeSelectorTerms"
    )


def test_only_pods_of_a_spot_pool_run_on_spot_nodes() -> None:
    pods = pods_of(render({"pools": POOLS, "spot": SPOT, **ALL}))
    assert {"platform head", "standing head", "reader", "platform gpu", "platform gpu-spot"} < set(
        pods
    )
    for place, pod in pods.items():
        if place.endswith("gpu-spot"):
            assert pod["spec"]["nodeSelector"] == {**MACHINE, "capacity": "spot"}, place
            assert SPOT["tolerations"][0] in pod["spec"]["tolerations"], place
            assert node_terms(pod) is None, place
        else:
            assert node_terms(pod) == [{"matchExpressions": OFF_SPOT}], place
            assert SPOT["tolerations"][0] not in pod["spec"].get("tolerations", []), place


def test_without_a_spot_pool_the_labels_of_spot_nodes_change_nothing() -> None:
    assert render({"spot": SPOT, **ALL}) == render(ALL)


def test_nodes_are_off_spot_if_one_of_several_labels_differs() -> None:
    labels = {"capacity": "spot", "kind": "cheap"}
    head = pods_of(render({"pools": POOLS, "spot": {"nodeSelector": labels}}))["platform head"]
    assert node_terms(head) == [
        {"matchExpressions": [{"key": key, "operator": "NotIn", "values": [value]}]}
        for key, value in labels.items()
    ]


def test_terms_of_the_values_restrict_nodes_further() -> None:
    """Kubernetes requires one of all terms, so a second list would widen the first."""
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": ZONES}}
    values = {"pools": POOLS, "spot": SPOT, "pod": {"affinity": {"nodeAffinity": required}}}
    pods = pods_of(render(values))
    assert node_terms(pods["platform gpu-spot"]) == ZONES
    for place in ("platform head", "platform gpu", "reader"):
        assert node_terms(pods[place]) == [
            {"matchExpressions": [*OFF_SPOT, *zone["matchExpressions"]]} for zone in ZONES
        ]


def test_kueue_tries_spot_pools_before_others() -> None:
    queue = {**KUEUE, "kueue": {"clusterQueue": "q", "nodes": {"cpu": 1, "gpu": 2, "gpu-spot": 4}}}
    objects = render({"pools": POOLS, "spot": SPOT, "queue": queue})
    (group,) = only(objects, "ClusterQueue")["spec"]["resourceGroups"]
    names = [flavor["name"] for flavor in group["flavors"]]
    assert names == ["q-cpu", "q-gpu-spot", "q-gpu"]
    flavor = of_kind(objects, "ResourceFlavor")["q-gpu-spot"]["spec"]
    assert flavor["nodeLabels"] == {**MACHINE, "capacity": "spot"}
    assert {"key": "capacity", "effect": "NoSchedule"} in flavor["nodeTaints"]


PACKED = {"gpu": {**GPU, "topologyKey": "topology.kubernetes.io/zone"}}


def test_the_scheduler_packs_the_workers_of_one_group_of_one_attempt() -> None:
    pods = pods_of(render({"pools": PACKED, **ALL}))
    packed = {place for place, pod in pods.items() if "affinity" in pod["spec"]}
    assert packed == {"platform gpu"}
    assert pods["platform gpu"]["spec"]["affinity"] == {
        "podAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {
                    "weight": 100,
                    "podAffinityTerm": {
                        "topologyKey": "topology.kubernetes.io/zone",
                        "labelSelector": {"matchLabels": {"ray.io/node-type": "worker"}},
                        "matchLabelKeys": ["ray.io/cluster", "ray.io/group"],
                    },
                }
            ]
        }
    }


def topologies(pods: dict[str, Object]) -> dict[str, dict[str, str]]:
    """Return what each pod asks of Kueue's topologies."""
    asked = {
        place: {
            key: value
            for key, value in pod["metadata"].get("annotations", {}).items()
            if key.startswith("kueue.x-k8s.io/podset-")
        }
        for place, pod in pods.items()
    }
    return {place: annotations for place, annotations in asked.items() if annotations}


@pytest.mark.parametrize(
    ("mode", "value"),
    [("preferred", None), ("required", None), ("unconstrained", "true")],
)
def test_kueue_packs_them_instead_as_the_pool_says(mode: str, value: str | None) -> None:
    """Without topologyMode the mode is `preferred`."""
    queue = {**KUEUE, "kueue": {"clusterQueue": "q", "nodes": {"cpu": 1, "gpu": 2}}}
    chosen = {} if mode == "preferred" else {"topologyMode": mode}
    objects = render({"pools": {"gpu": PACKED["gpu"] | chosen}, "queue": queue, **ALL})
    pods = pods_of(objects)
    key = f"kueue.x-k8s.io/podset-{mode}-topology"
    assert topologies(pods) == {"platform gpu": {key: value or "topology.kubernetes.io/zone"}}
    assert not any("affinity" in pod["spec"] for pod in pods.values())
    flavors = of_kind(objects, "ResourceFlavor")
    assert {
        name: flavor["spec"]["topologyName"]
        for name, flavor in flavors.items()
        if "topologyName" in flavor["spec"]
    } == {"q-gpu": "q-gpu"}
    assert only(objects, "Topology")["spec"]["levels"] == [
        {"nodeLabel": "topology.kubernetes.io/zone"},
        {"nodeLabel": "kubernetes.io/hostname"},
    ]


def test_heads_in_the_flavor_of_a_packed_pool_ask_for_a_place_in_its_topology() -> None:
    """Kueue assigns a flavor with a topology to no pod that does not ask for one, beside other flavors."""
    nodes = {"clusterQueue": "q", "nodes": {"cpu": 1, "gpu": 2}}
    heads = {"nodeSelector": MACHINE}
    pools = {"cpu": {"nodeSelector": MACHINE, "topologyKey": "rack"}, "gpu": GPU}
    objects = render({"pools": pools, "head": heads, "queue": {**KUEUE, "kueue": nodes}, **ALL})
    assert topologies(pods_of(objects)) == {
        "platform head": {"kueue.x-k8s.io/podset-unconstrained-topology": "true"},
        "platform cpu": {"kueue.x-k8s.io/podset-preferred-topology": "rack"},
    }


def test_a_queue_of_others_has_its_own_topologies() -> None:
    objects = render({"pools": PACKED, "queue": {**KUEUE, "kueue": {"clusterQueue": "theirs"}}})
    assert of_kind(objects, "Topology") == {}


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_are_valid(version: str) -> None:
    pods = pods_of(render({"pools": POOLS | PACKED, "spot": SPOT, **ALL}))
    assert [one for pod in as_objects(pods) for one in problems(pod, version)] == []
