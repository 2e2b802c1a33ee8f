"""What values set for pods: which pods get it, which value wins, and what it may not change."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.helm_chart import (
    CHART,
    Object,
    environment,
    of_kind,
    only,
    platform_of,
    pods_of,
    render,
    run_helm,
)
from tests.charts.kubernetes_versions import VERSIONS, as_objects, is_known, problems
from tests.charts.pod_security import violations
from trainyard.planning.merge import merge
from trainyard.planning.plan import plan_run
from trainyard.planning.render import render_job
from trainyard.platform import parse_platform
from trainyard.rules.check import check
from trainyard.rules.field_path import FieldPath
from trainyard.rules.pods.pod_security import baseline, containers_of, restricted
from trainyard.run_file.load import load_run
from trainyard.run_file.yaml_text import KubernetesLoader

ROOT = CHART.parents[1]
TERM = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
NODES = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [TERM]}
    }
}
NEIGHBOURS = {
    "podAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 1, "podAffinityTerm": {"topologyKey": "rack", "labelSelector": {}}}
        ]
    }
}
SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
SETTINGS: dict[str, Any] = {
    "env": {"WANDB_MODE": "offline"},
    "envFrom": [{"secretRef": {"name": "hub"}}],
    "volumes": [
        {"name": "data", "persistentVolumeClaim": {"claimName": "imagenet", "readOnly": True}},
        {"name": "ca", "configMap": {"name": "ca"}},
        {"name": "fast", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
        {"name": "keys", "csi": {"driver": "secrets-store.csi.k8s.io", "readOnly": True}},
        {
            "name": "nvme",
            "ephemeral": {
                "volumeClaimTemplate": {
                    "spec": {
                        "accessModes": ["ReadWriteOnce"],
                        "resources": {"requests": {"storage": "1Ti"}},
                    }
                }
            },
        },
    ],
    "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
    "annotations": {"sidecar.istio.io/inject": "false"},
    "labels": {"cost-center": "vision"},
    "affinity": {**NODES, **NEIGHBOURS},
    "topologySpreadConstraints": [SPREAD],
    "priorityClassName": "training",
    "runtimeClassName": "gvisor",
    "schedulerName": "packing",
    "dnsConfig": {"options": [{"name": "ndots", "value": "2"}]},
    "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["hub"]}],
    "initContainers": [{"name": "wait", "image": "busybox:1.36", "command": ["true"]}],
    "sidecars": [{"name": "logs", "image": "fluent:3", "securityContext": {"runAsUser": 2000}}],
    "resources": {"hugepages-2Mi": "2Gi", "rdma/hca": "1"},
    "patch": {"spec": {"securityContext": {"supplementalGroups": [5000]}}},
}  # fmt: skip
EVERYTHING = {
    "rayCluster": {"enabled": True},
    "prePull": {"enabled": True},
    "test": {"gpus": True},
}
RAY = ("platform", "standing")


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return render({**EVERYTHING, "pod": SETTINGS})


def job_of(objects: list[Object], settings: Sequence[str] = (), **resources: str) -> Object:
    platform = parse_platform(yaml.safe_dump(platform_of(objects)), "test")
    plan = plan_run(
        load_run(ROOT / "examples/digits.yaml", settings, **resources), platform, "team"
    )
    return merge(render_job(plan), platform, plan)


TEXTS = (
    "1e400", "1e-400", "1e5", "=", "<<", "010", "0o17", "0x_F", "1_000", "yes", "~", "2024-01-01", "12:30",
    ".inf", "", " a", "a: b", "a #b", "'", "a\nb", "a\r\nb", "$(X)", "{{ x }}", "[a]", "!x", "*x", "%x",
)  # fmt: skip


def test_texts_of_values_reach_runs_as_they_are_written() -> None:
    """Helm and the launcher read YAML by different libraries, which differ in what is a number."""
    env = {f"V{number}": text for number, text in enumerate(TEXTS)}
    rendered = yaml.load_all(run_helm({"pod": {"env": env}}).stdout, KubernetesLoader)
    published = of_kind(filter(None, rendered), "ConfigMap")["trainyard-platform"]
    platform = parse_platform(published["data"]["platform.yaml"], "test")
    head = platform.ray_cluster_spec["headGroupSpec"]["template"]
    assert {name: environment(head)[name] for name in env} == env


def test_each_pod_gets_what_concerns_it(objects):
    for place, pod in pods_of(objects).items():
        spec, container = pod["spec"], pod["spec"]["containers"][0]
        is_ray, pulls = place.startswith(RAY), place.startswith("trainyard-prepull")
        assert pod["metadata"]["labels"].items() >= SETTINGS["labels"].items(), place
        assert pod["metadata"]["annotations"].items() >= SETTINGS["annotations"].items(), place
        assert spec["affinity"] == (SETTINGS["affinity"] if is_ray else NODES), place
        for key in ("schedulerName", "runtimeClassName"):
            assert spec[key] == SETTINGS[key], place
        for key in ("priorityClassName", "dnsConfig", "hostAliases"):
            assert spec.get(key) == (None if pulls else SETTINGS[key]), place
        assert container.get("envFrom") == (None if pulls else SETTINGS["envFrom"]), place
        assert pulls or environment(pod)["WANDB_MODE"] == "offline", place
        assert pulls or spec["volumes"][-len(SETTINGS["volumes"]) :] == SETTINGS["volumes"], place
        assert pulls or container["volumeMounts"][-1] == SETTINGS["volumeMounts"][0], place
        groups = spec["securityContext"].get("supplementalGroups")
        assert groups == (None if pulls else [5000]), place
        spread = spec.get("topologySpreadConstraints")
        assert spread == (SETTINGS["topologySpreadConstraints"] if is_ray else None), place
        assert ("initContainers" in spec) == is_ray, place
        assert len(spec["containers"]) == 1 + is_ray, place


def test_further_containers_are_as_confined_as_ray(objects):
    for place, pod in pods_of(objects).items():
        assert violations(pod["spec"]) == [], place
    pod = pods_of(objects)["platform gpu"]["spec"]
    ray, logs = pod["containers"]
    assert pod["initContainers"][0]["securityContext"] == ray["securityContext"]
    assert logs["securityContext"] == ray["securityContext"] | {"runAsUser": 2000}


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_are_valid_for(version, objects):
    own = [one for one in [*objects, *as_objects(pods_of(objects))] if is_known(one)]
    assert [problem for one in own for problem in problems(one, version)] == []


@pytest.mark.parametrize("resources", [{"workers": "2"}, {"gpus": "16"}])
def test_a_run_with_these_pods_breaks_no_rule(objects, resources):
    job = job_of(objects, **resources)
    errors = [one for one in check(job, "1.6", "2.60.0") if one.severity == "error"]
    assert errors == []
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    quantities = groups[0]["template"]["spec"]["containers"][0]["resources"]
    for key in ("requests", "limits"):
        assert quantities[key].items() >= SETTINGS["resources"].items()
        assert {"cpu", "memory"} <= quantities[key].keys()


@pytest.mark.parametrize(
    ("pod", "path"),
    [
        ({"affinity": {"nodeAfinity": {}}}, "affinity.nodeAfinity"),
        ({"volumes": [{"name": "a", "emptyDirs": {}}]}, "volumes[3].emptyDirs"),
        ({"patch": {"spec": {"hostUsers": "no"}}}, "hostUsers"),
    ],
)
def test_a_field_that_kubernetes_does_not_have_is_found_in_the_run_s_rayjob(pod, path):
    job = job_of(render({"pod": pod}), workers="2")
    errors = {one.path for one in check(job, "1.6", "2.60.0") if one.severity == "error"}
    groups = ("headGroupSpec", "workerGroupSpecs[0]")
    assert errors == {f"spec.rayClusterSpec.{group}.template.spec.{path}" for group in groups}


def test_a_special_value_wins_maps_merge_and_lists_add():
    volumes = [{"name": name, "emptyDir": {}} for name in ("a", "b")]
    general = {"env": {"A": "1", "B": "1"}, "volumes": volumes[:1], "schedulerName": "general"}
    special = {"env": {"B": "2", "C": "2"}, "volumes": volumes[1:], "schedulerName": "special"}
    values = {
        "pod": general,
        "pools": {"gpu": {"pod": special}},
        "head": {"pod": {"env": {"B": "3"}}},
    }
    pods = pods_of(render(values))
    assert {key: environment(pods["platform gpu"])[key] for key in "ABC"} == {
        "A": "1",
        "B": "2",
        "C": "2",
    }
    assert pods["platform gpu"]["spec"]["volumes"][-2:] == volumes
    assert pods["platform gpu"]["spec"]["schedulerName"] == "special"
    for place in ("platform head", "reader"):
        assert environment(pods[place])["B"] == "3", place
        assert pods[place]["spec"]["schedulerName"] == "general", place
    assert "C" not in environment(pods["platform cpu"])


def test_a_patch_deletes_merges_by_name_and_replaces():
    ray = {"name": "ray-worker", "env": [{"name": "RAY_memory_usage_threshold", "value": "0.9"}]}
    ray["volumeMounts"] = [{"name": "tmp", "mountPath": "/scratch"}]
    special = {"spec": {"containers": [ray], "tolerations": []}}
    general = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {"enableServiceLinks": None, "securityContext": {"fsGroupChangePolicy": None}},
    }
    values = {
        "pod": {"labels": {"team": "b"}, "patch": general},
        "pools": {"gpu": {"pod": {"patch": special}}},
    }
    pods = pods_of(render(values))
    for place in ("platform head", "platform gpu", "platform cpu", "reader"):
        spec = pods[place]["spec"]
        assert "enableServiceLinks" not in spec, place
        assert spec["securityContext"].keys() >= {"runAsUser", "fsGroup"}, place
        assert "fsGroupChangePolicy" not in spec["securityContext"], place
        assert pods[place]["metadata"]["labels"]["team"] == "a", place
    patched, other = pods["platform gpu"], pods["platform cpu"]
    assert environment(patched) == environment(other) | {"RAY_memory_usage_threshold": "0.9"}
    (container,) = patched["spec"]["containers"]
    before = other["spec"]["containers"][0]["volumeMounts"]
    assert container["volumeMounts"] == [*before, ray["volumeMounts"][0]]
    assert patched["spec"]["tolerations"] == []


def test_attempts_stay_apart_beside_an_affinity():
    values = {"job": {"separateAttempts": True}, "pod": {"affinity": {**NODES, **NEIGHBOURS}}}
    affinity = pods_of(render(values))["platform gpu"]["spec"]["affinity"]
    assert affinity.keys() == {"nodeAffinity", "podAffinity", "podAntiAffinity"}


def test_quotas_of_a_queue_cover_further_resources():
    values = {
        "queue": {
            "system": "kueue",
            "name": "runs",
            "kueue": {"clusterQueue": "vision", "nodes": {"gpu": 4}, "runs": 3},
        },
        "pod": {"resources": {"hugepages-2Mi": "2Gi"}},
        "pools": {"gpu": {"pod": {"resources": {"vendor.example/fpga": "2"}}}},
    }
    (group,) = only(render(values), "ClusterQueue")["spec"]["resourceGroups"]
    heads, gpu = (
        {one["name"]: one["nominalQuota"] for one in flavor["resources"]}
        for flavor in group["flavors"]
    )
    assert (heads["hugepages-2Mi"], gpu["hugepages-2Mi"]) == ("6Gi", "8Gi")
    assert (heads["vendor.example/fpga"], gpu["vendor.example/fpga"]) == ("0", "8")


def unrestricted(values: Object, folder: Path) -> list[str]:
    """What NOTES.txt says about Pod Security; helm template itself leaves NOTES.txt out."""
    chart = folder / "chart"
    shutil.copytree(CHART, chart, dirs_exist_ok=True)
    template = 'unrestricted: {{ include "trainyard.unrestricted" . | toJson }}\n'
    (chart / "templates/unrestricted.yaml").write_text(template)
    rendered = run_helm(values, chart=chart)
    assert rendered.returncode == 0, rendered.stderr
    documents = yaml.safe_load_all(rendered.stdout)
    (text,) = [one["unrestricted"] for one in documents if one and "unrestricted" in one]
    found: list[str] = yaml.safe_load(text)
    return found


SIDECAR = {"name": "side", "image": "side:1"}
APPARMOR = "container.apparmor.security.beta.kubernetes.io/ray-worker"


def in_patch(**security: Any) -> Object:
    """A patch of a pod's securityContext."""
    return {"patch": {"spec": {"securityContext": security}}}


@pytest.mark.parametrize(
    ("pod", "field"),
    [
        ({"volumes": [{"name": "disk", "hostPath": {"path": "/mnt"}}]}, "volumes.disk.hostPath"),
        ({"patch": {"spec": {"hostNetwork": True}}}, "hostNetwork"),
        (
            {"patch": {"spec": {"securityContext": {"runAsNonRoot": None}}}},
            "containers.ray-worker.runAsNonRoot",
        ),
        ({"sidecars": [SIDECAR | {"securityContext": {"privileged": True}}]}, "containers.side.privileged"),
        ({"initContainers": [SIDECAR | {"securityContext": {"runAsUser": 0}}]}, "containers.side.runAsUser"),
        (
            {"sidecars": [SIDECAR | {"securityContext": {"capabilities": {"add": ["SYS_PTRACE"]}}}]},
            "containers.side.capabilities.add",
        ),
        (
            {"sidecars": [SIDECAR | {"ports": [{"containerPort": 1, "hostPort": 1}]}]},
            "containers.side.ports.hostPort",
        ),
        (in_patch(runAsUser=0), "securityContext.runAsUser"),
        (in_patch(runAsNonRoot=False), "securityContext.runAsNonRoot"),
        (in_patch(seccompProfile={"type": "Unconfined"}), "securityContext.seccompProfile"),
        (in_patch(appArmorProfile={"type": "Unconfined"}), "securityContext.appArmorProfile"),
        (in_patch(seLinuxOptions={"type": "spc_t"}), "securityContext.seLinuxOptions"),
        (in_patch(seLinuxOptions={"role": "sysadm_r"}), "securityContext.seLinuxOptions"),
        (in_patch(windowsOptions={"hostProcess": True}), "securityContext.windowsOptions.hostProcess"),
        (in_patch(sysctls=[{"name": "net.a", "value": "1"}]), "securityContext.sysctls.net.a"),
        ({"annotations": {APPARMOR: "unconfined"}}, f"annotations.{APPARMOR}"),
        (
            {"sidecars": [SIDECAR | {"securityContext": {"procMount": "Unmasked"}}]},
            "containers.side.procMount",
        ),
        (
            {"sidecars": [SIDECAR | {"securityContext": {"seLinuxOptions": {"user": "root"}}}]},
            "containers.side.seLinuxOptions",
        ),
        (
            {"sidecars": [SIDECAR | {"livenessProbe": {"tcpSocket": {"host": "a", "port": 1}}}]},
            "containers.side.livenessProbe.tcpSocket.host",
        ),
    ],
)  # fmt: skip
def test_notes_name_the_value_that_leaves_restricted(pod, field, tmp_path):
    values = {"pools": {"gpu": {"pod": pod}}}
    assert unrestricted(values, tmp_path) == [f"pool gpu: {field}"]
    pods = {place: FieldPath("", one) for place, one in pods_of(render(values)).items()}
    places = {
        place
        for place, one in pods.items()
        if [*baseline(one, containers_of(one)), *restricted(one, containers_of(one))]
    }
    assert places == {"platform gpu"}


@pytest.mark.parametrize(
    "pod",
    [
        in_patch(
            seLinuxOptions={"type": "container_t", "level": "s0:c1"},
            appArmorProfile={"type": "Localhost", "localhostProfile": "ray"},
            sysctls=[{"name": "net.ipv4.tcp_rmem", "value": "4096 87380 6291456"}],
        ),
        {"annotations": {APPARMOR: "localhost/ray"}},
        {"sidecars": [SIDECAR | {"livenessProbe": {"tcpSocket": {"port": 1}}}]},
    ],
)
def test_notes_are_silent_about_what_restricted_permits(pod, tmp_path):
    assert unrestricted({"pools": {"gpu": {"pod": pod}}}, tmp_path) == []


def test_notes_name_a_token_that_a_patch_mounts(tmp_path):
    patch = {"spec": {"automountServiceAccountToken": True}}
    values = {"head": {"pod": {"patch": patch}}}
    assert unrestricted(values, tmp_path) == ["heads: automountServiceAccountToken"]


def test_notes_are_silent_about_pods_that_are_restricted(tmp_path):
    assert unrestricted({"pod": SETTINGS}, tmp_path) == []
    assert 'include "trainyard.unrestricted"' in (CHART / "templates/NOTES.txt").read_text()
