"""The examples of values, for clusters as people have them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.charts.helm_chart import CHART, Object, of_kind, only, platform_of, pods_of, render
from tests.charts.kubernetes_versions import VERSIONS, as_objects, is_known, problems
from tests.charts.pod_security import violations
from trainyard.planning.merge import merge
from trainyard.planning.nodes.affinity import selects
from trainyard.planning.plan import plan_run
from trainyard.planning.render import render_job
from trainyard.platform import parse_platform
from trainyard.run_file.load import load_run

PRESETS = {path.stem.removeprefix("values-"): path for path in CHART.glob("values-*.yaml")}
RUN = CHART.parents[1] / "examples/digits.yaml"


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Object]]:
    return {name: render({}, presets=[path]) for name, path in PRESETS.items()}


def test_there_is_one_for_each_kind_of_cluster():
    assert sorted(PRESETS) == ["aks", "eks", "gke", "kind", "onprem"]


@pytest.mark.parametrize("preset", PRESETS)
def test_its_objects_are_valid_and_its_pods_restricted(preset, rendered):
    pods = pods_of(rendered[preset])
    own = [one for one in [*rendered[preset], *as_objects(pods)] if is_known(one)]
    assert [
        problem for one in own for version in VERSIONS for problem in problems(one, version)
    ] == []
    assert [violations(pod["spec"]) for pod in pods.values() if violations(pod["spec"])] == []


@pytest.mark.parametrize("preset", PRESETS)
def test_runs_can_be_planned_and_rendered_on_it(preset, rendered):
    platform = parse_platform(yaml.safe_dump(platform_of(rendered[preset])), preset)
    pool = platform.pool(platform.default_pools.gpus)
    for resources in ({"workers": "2"}, {"gpus": str(2 * pool.gpus_per_node)}):
        settings = [f"train.global_batch_size={64 * pool.gpus_per_node}"]
        plan = plan_run(load_run(RUN, settings, **resources), platform, "team-vision")
        assert merge(render_job(plan), platform, plan)["kind"] == "RayJob"


@pytest.mark.parametrize("preset", PRESETS)
def test_it_changes_what_it_names(preset):
    """What equals the default is noise in an example."""
    default = yaml.safe_load((CHART / "values.yaml").read_text())
    for path, value in leaves(yaml.safe_load(PRESETS[preset].read_text())):
        there = default
        for key in path:
            there = there.get(key) if isinstance(there, dict) else None
        assert path[0] == "pools" or there != value, ".".join(path)


def leaves(node: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if not isinstance(node, dict):
        return [(path, node)]
    return [leaf for key, value in node.items() for leaf in leaves(value, (*path, key))]


@pytest.mark.parametrize("preset", PRESETS)
def test_it_explains_itself_and_leads_with_the_command(preset):
    text = PRESETS[preset].read_text()
    for comments, block in re.findall(r"(?m)((?:^# .*\n)*)(^\w.*\n(?:^(?!\w|# ).*\n)*)", text):
        assert comments or "# " in block, block
    command = next(line for line in text.splitlines() if "helm upgrade --install" in line)
    assert f"-f charts/trainyard/{PRESETS[preset].name}" in command


@pytest.mark.parametrize("preset", ["aks", "eks", "gke", "onprem"])
def test_what_must_be_changed_is_marked(preset):
    """Each line with an invented name stands below a line that says CHANGE, or is one."""
    lines = PRESETS[preset].read_text().splitlines()
    for number, line in enumerate(lines):
        if re.search(r"\bexample\b|1111|example[.-]|10\.\d+\.", line) and "#" not in line:
            above = "\n".join(lines[max(0, number - 5) : number])
            assert "CHANGE" in above, line


def test_eks_runs_have_a_role_and_no_secret(rendered):
    objects = rendered["eks"]
    annotations = only(objects, "ServiceAccount")["metadata"]["annotations"]
    assert annotations["eks.amazonaws.com/role-arn"].startswith("arn:aws:iam::")
    assert "secretKeyRef" not in str(pods_of(objects))


CLOUDS = {
    "aks": "kubernetes.azure.com/scalesetpriority=spot",
    "eks": "karpenter.sh/capacity-type=spot",
    "gke": "cloud.google.com/gke-spot=true",
}


@pytest.mark.parametrize("preset", CLOUDS)
def test_runs_may_prefer_the_spot_nodes_of_a_cloud_and_fall_back(preset, rendered):
    platform = parse_platform(yaml.safe_dump(platform_of(rendered[preset])), preset)
    gpus = platform.pool("gpu").gpus_per_node
    settings = [
        "resources.pool=[gpu-spot, gpu]",
        f"train.global_batch_size={64 * gpus}",
    ]
    plan = plan_run(load_run(RUN, settings, gpus=str(2 * gpus)), platform, "team-vision")
    assert plan.pools == ("gpu-spot", "gpu")
    shape = merge(render_job(plan), platform, plan)["spec"]["rayClusterSpec"]
    workers = shape["workerGroupSpecs"][0]["template"]["spec"]
    head = shape["headGroupSpec"]["template"]["spec"]
    key, _, value = CLOUDS[preset].partition("=")
    machine = pods_of(rendered[preset])["platform gpu"]["spec"]["nodeSelector"]
    assert selects(workers, "spot", {**machine, key: value})
    assert selects(workers, "on-demand", machine)
    assert not selects(head, "spot", {**head.get("nodeSelector", {}), key: value})


def test_aks_pods_may_use_a_managed_identity(rendered):
    objects = rendered["aks"]
    annotations = only(objects, "ServiceAccount")["metadata"]["annotations"]
    assert annotations.keys() == {"azure.workload.identity/client-id"}
    for place in ("platform head", "platform gpu", "platform gpu-spot"):
        labels = pods_of(objects)[place]["metadata"]["labels"]
        assert labels["azure.workload.identity/use"] == "true"


def test_onprem_runs_are_packed_into_racks(rendered):
    assert only(rendered["onprem"], "Topology")["spec"]["levels"][0] == {"nodeLabel": "rack"}


def test_gke_slices_are_counted(rendered):
    pools = {pool["name"]: pool for pool in platform_of(rendered["gke"])["pools"]}
    assert pools["slices"]["gpuResource"] == "nvidia.com/mig-1g.5gb"


def test_onprem_shares_the_cluster(rendered):
    objects = rendered["onprem"]
    assert only(objects, "LocalQueue")["spec"]["clusterQueue"] == "vision"
    assert only(objects, "PrometheusRule")
    assert len(of_kind(objects, "NetworkPolicy")) == 2


def test_kind_asks_for_little(rendered):
    platform = platform_of(rendered["kind"])
    (pool,) = [one for one in platform["pools"] if one["name"] == "cpu"]
    assert platform["head"]["cpuRequest"] + pool["cpuRequest"] < 1
    assert platform_of(rendered["kind"])["job"]["keepHeadSecondsAfterFailure"] == 300
