"""What was seen of a cluster becomes checks; a pod that works like a run's tells the rest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import FakeCluster

from trainyard.diagnosis.preflight.checks import checks
from trainyard.diagnosis.preflight.facts import RIGHTS, Check, ClusterFacts, Probe
from trainyard.diagnosis.preflight.installation import kuberay_of
from trainyard.diagnosis.probe import (
    SETTLE_S,
    keys_of_secrets,
    probe_pod,
    run_probe,
    survey,
    suspended_job,
    try_operator,
)
from trainyard.errors import ClusterError, ClusterUnreachable
from trainyard.planning.capacity.quota import over_quota
from trainyard.planning.merge import merge
from trainyard.planning.plan import plan_run
from trainyard.planning.render import render_job
from trainyard.platform import DataVolume, Platform
from trainyard.rules.check import check
from trainyard.run_file.load import load_run
from trainyard_trainer.config.variables import SecretKey
from trainyard_trainer.run_files.programs.isolation import IN_PODS

Object = dict[str, Any]

DIGITS = Path(__file__).resolve().parents[2] / "examples/digits.yaml"
TOLD = {
    "versions": {"python": "3.11.2", "ray": "2.60.0"},
    "programs": {"bash": "/bin/bash", "python": "/usr/bin/python", "ray": "/usr/bin/ray"},
    "storage": {"write": "ok", "read": "ok", "list": "ok", "delete": "ok"},
}
IMAGE = "registry.example.com/trainyard:1"


def crd(**fields: Any) -> Object:
    properties = {"spec": {"properties": fields}}
    version = {"name": "v1", "schema": {"openAPIV3Schema": {"properties": properties}}}
    return {"spec": {"versions": [{"name": "v1alpha1"}, version]}}


def operator(version: str = "v1.6.2", *, ready: bool = True) -> Object:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {
        "metadata": {"name": "kuberay-operator-1", "namespace": "kuberay-system"},
        "spec": {"containers": [{"image": f"quay.io/kuberay/operator:{version}"}]},
        "status": {"conditions": conditions},
    }


def node() -> Object:
    return {
        "metadata": {"name": "node-1"},
        "status": {
            "allocatable": {"cpu": "64", "memory": "500Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def holder() -> Object:
    """A pod that leaves nothing on the node."""
    container = {"resources": {"requests": {"cpu": "64"}}}
    return {
        "metadata": {"name": "holder"},
        "spec": {"nodeName": "node-1", "containers": [container]},
        "status": {"phase": "Running"},
    }


@pytest.fixture
def job(platform: Platform) -> Object:
    """Two workers of 2 CPUs and 4 GiB, and a head."""
    plan = plan_run(load_run(DIGITS, workers="2"), platform, "team")
    return merge(render_job(plan), platform, plan)


@pytest.fixture
def good(platform: Platform, job: Object) -> ClusterFacts:
    bound = {"status": {"phase": "Bound"}}
    return ClusterFacts(
        namespace="team",
        version={"gitVersion": "v1.34.4"},
        crd=crd(preRunningDeadlineSeconds={}),
        operators=(operator(),),
        answered_s=0.4,
        rights=dict.fromkeys(RIGHTS, True),
        platform=platform,
        job=job,
        quotas=(),
        nodes=(node(),),
        pods=(),
        probe=Probe(
            image=IMAGE,
            storage="/mnt/trainyard",
            pod={"spec": {"nodeName": "node-1"}},
            claims={"trainyard-storage": bound},
            log="probe {}",
            record=TOLD,
        ),
    )


def only(found: list[Check], name: str) -> Check:
    (check,) = [check for check in found if check.name == name]
    return check


def data_volume(claim: str | None) -> DataVolume:
    source = {"csi": {}} if claim is None else {"persistentVolumeClaim": {"claimName": claim}}
    mount = {"name": "data-imagenet", "mountPath": "/data/imagenet"}
    return DataVolume(name="imagenet", volume={"name": "data-imagenet", **source}, mount=mount)


def claim(mode: str, phase: str = "Bound") -> Object:
    return {"spec": {"accessModes": [mode]}, "status": {"phase": phase}}


@pytest.mark.parametrize(
    ("claims", "nodes", "state", "says"),
    [
        ({"ro": claim("ReadOnlyMany")}, 2, "ok", "claim ro is Bound, ReadOnlyMany"),
        ({"ro": None}, 2, "failed", "claim ro does not exist in namespace team"),
        ({}, 2, "not known", "no permission to read claim ro"),
        ({"ro": claim("ReadWriteMany", "Pending")}, 2, "not known", "claim ro is Pending"),
        ({"ro": claim("ReadWriteOnce")}, 2, "failed", "only one node can mount it"),
        ({"ro": claim("ReadWriteOnce")}, 1, "ok", "claim ro is Bound, ReadWriteOnce"),
        ({"ro": claim("ReadWriteOncePod")}, 1, "failed", "only one node can mount it"),
    ],
)
def test_the_claims_of_data_volumes_are_checked(
    good: ClusterFacts, claims: dict[str, Object | None], nodes: int, state: str, says: str
) -> None:
    facts = replace(good, volumes=(data_volume("ro"),), claims=claims, nodes=(node(),) * nodes)
    check = only(checks(facts), "volume imagenet")
    assert check.state == state
    assert says in check.seen


def test_a_data_volume_without_a_claim_is_not_checked(good: ClusterFacts) -> None:
    facts = replace(good, volumes=(data_volume(None),))
    assert only(checks(facts), "volume imagenet").state == "not known"


@pytest.mark.parametrize(
    ("keys", "state", "says"),
    [
        ({"hub": frozenset({"token"})}, "ok", "Secret hub has the key token"),
        ({"hub": None}, "failed", "Secret hub does not exist in namespace team"),
        ({"hub": frozenset({"b", "a"})}, "failed", "Secret hub has no key token; its keys: a, b"),
        ({"hub": frozenset()}, "failed", "its keys: none"),
        ({}, "not known", "no permission to read Secret hub"),
    ],
)
def test_the_secrets_of_a_run_file_are_checked(
    good: ClusterFacts, keys: dict[str, frozenset[str] | None], state: str, says: str
) -> None:
    secrets = {"HF_TOKEN": SecretKey(name="hub", key="token")}
    check = only(checks(replace(good, secrets=secrets, secret_keys=keys)), "secret HF_TOKEN")
    assert check.state == state
    assert says in check.seen
    assert ("secrets.HF_TOKEN." in check.remedy) == (state == "failed")


class WithSecrets(FakeCluster):
    """With one Secret that may be read, one that may not, and none else."""

    def get(self, kind: str, name: str) -> Object | None:
        if name == "hidden":
            raise ClusterError("refused", reason="Forbidden")
        return {"data": {"token": "Y2FuYXJ5"}} if name == "hub" else None


def test_of_a_secret_only_the_names_of_its_keys_are_kept() -> None:
    secrets = [SecretKey(name=name, key="token") for name in ("hub", "hidden", "absent")]
    found = keys_of_secrets(WithSecrets(), secrets)
    assert found == {"hub": frozenset({"token"}), "absent": None}


def test_another_error_than_a_missing_right_is_raised() -> None:
    class Broken(FakeCluster):
        def get(self, kind: str, name: str) -> Object | None:
            raise ClusterError("500", reason="InternalError")

    with pytest.raises(ClusterError, match="500"):
        keys_of_secrets(Broken(), [SecretKey(name="hub", key="token")])


def test_a_cluster_that_can_is_ok_in_every_check(good: ClusterFacts) -> None:
    found = checks(good)
    assert [check.state for check in found] == ["ok"] * 15
    assert "free now: cpu: 2 of 2 pods" in only(found, "nodes").seen


@pytest.mark.parametrize(
    ("changes", "name", "state", "seen"),
    [
        ({"version": {"gitVersion": "v1.27.3"}}, "cluster", "failed", "v1.27.3"),
        ({"version": {}}, "cluster", "not known", "without a version"),
        ({"missing_kinds": ("RayJob",)}, "KubeRay CRDs", "failed", "does not know RayJob"),
        ({"crd": crd(entrypoint={})}, "KubeRay CRDs", "failed", "before 1.6"),
        ({"crd": None}, "KubeRay CRDs", "ok", "no permission to read"),
        ({"operators": None}, "operator", "ok", "gave a RayJob a status within 1 s"),
        ({"operators": None, "answered_s": None}, "operator", "not known", "no RayJob could"),
        ({"answered_s": float("inf"), "is_silent": True}, "operator", "failed", "no status within"),
        ({"operators": (operator("v1.4.0"),)}, "operator", "failed", "v1.4.0"),
        (
            {"rights": dict.fromkeys(RIGHTS, True) | {("Pod", "exec", "create"): False}},
            "rights",
            "failed",
            "you may not create Pod/exec",
        ),
        ({"rights": dict.fromkeys(RIGHTS)}, "rights", "not known", "does not report"),
        (
            {"platform": None, "platform_problem": "no ConfigMap", "probe": None},
            "platform",
            "failed",
            "no ConfigMap",
        ),
        ({"job_refused": 'unknown field "spec.x"'}, "RayJob", "failed", "spec.x"),
        ({"quotas": None}, "quota", "not known", "no permission to read"),
        ({"nodes": None}, "nodes", "not known", "no permission to read"),
        ({"nodes": ()}, "nodes", "failed", "0 nodes may run these pods"),
        ({"nodes": (node(),), "pods": (holder(),)}, "nodes", "not known", "the run waits"),
        ({"job": None}, "nodes", "not known", "pool gpu: 0 nvidia.com/gpu on 0"),
        ({"probe": None}, "storage", "not known", "no probe pod"),
    ],
)
def test_one_thing_that_is_wrong_shows_in_its_check(
    good: ClusterFacts, changes: Object, name: str, state: str, seen: str
) -> None:
    check = only(checks(replace(good, **changes)), name)
    assert (check.state, seen in check.seen) == (state, True), check
    assert check.remedy or state != "failed"


def test_a_cluster_that_does_not_answer_is_one_failed_check() -> None:
    (check,) = checks(ClusterFacts(namespace="team", silence="the cluster at x does not answer"))
    assert check.state == "failed"


@pytest.mark.parametrize(
    ("fields", "version"),
    [
        ({"entrypoint": {}}, "older"),
        ({"preRunningDeadlineSeconds": {}}, "1.6"),
        ({"rayClusterSpec": {"properties": {"networkPolicy": {}}}}, "1.7"),
    ],
)
def test_the_fields_of_a_definition_tell_its_version(fields: Object, version: str) -> None:
    assert kuberay_of(crd(**fields)) == version


# What the probe pod tells.


@pytest.mark.parametrize(
    ("told", "name", "seen"),
    [
        ({"programs": {"bash": None, "ray": "/usr/bin/ray"}}, "programs", "no bash"),
        ({"storage": {"write": "Permission denied"}}, "storage", "write: Permission denied"),
        ({"versions": {"ray": "2.55.0"}}, "Ray version", "2.55.0 in the image, 2.60.0"),
        ({"versions": {}}, "Ray version", "none in the image"),
    ],
)
def test_what_the_program_in_the_pod_finds_wrong_is_failed(
    good: ClusterFacts, told: Object, name: str, seen: str
) -> None:
    assert good.probe is not None
    check = only(checks(replace(good, probe=replace(good.probe, record=TOLD | told))), name)
    assert check.state == "failed"
    assert seen in check.seen
    assert check.remedy


def test_a_pod_that_is_refused_proves_nothing_else(good: ClusterFacts) -> None:
    refused = Probe(image=IMAGE, storage="/mnt", refused='violates PodSecurity "restricted"')
    found = checks(replace(good, probe=refused))
    assert only(found, "Pod Security").state == "failed"
    assert {only(found, name).state for name in ("image", "storage", "claim")} == {"not known"}


def test_an_image_without_the_probe_is_told_with_its_words(good: ClusterFacts) -> None:
    probe = Probe(
        image=IMAGE, storage="/mnt", log="No module named trainyard_trainer.tools.pods.probe\n"
    )
    check = only(checks(replace(good, probe=probe)), "programs")
    assert check.state == "failed"
    assert "No module named trainyard_trainer.tools.pods.probe" in check.seen


# The pod itself.


class Scripted(FakeCluster):
    """Gives the probe pod one status after the other."""

    def __init__(self, *statuses: Object) -> None:
        super().__init__()
        self.statuses = list(statuses)
        self.created: Object = {}

    def create(self, body: Object, *, dry_run: bool = False) -> Object:
        self.created = body
        self.logs[body["metadata"]["name"]] = f"a warning\nprobe {json.dumps(TOLD)}\n"
        return super().create(body, dry_run=dry_run)

    def get(self, kind: str, name: str) -> Object | None:
        found = super().get(kind, name)
        if kind == "Pod" and found is not None:
            status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
            return found | {"status": status}
        return found


def probe(cluster: FakeCluster, platform: Platform) -> Probe:
    seconds = iter(range(10_000))
    return run_probe(
        cluster, platform, IMAGE, clock=lambda: float(next(seconds)), sleep=lambda _: None
    )


def test_the_probe_pod_is_the_readers_with_another_program(platform: Platform) -> None:
    pod = probe_pod(platform, IMAGE)
    (container,) = pod["spec"]["containers"]
    shape = platform.reader_pod["spec"]
    assert container["command"] == [*IN_PODS, "trainyard_trainer.tools.pods.probe"]
    assert container["args"] == ["--path", "/mnt/trainyard"]
    assert container["image"] == IMAGE
    assert container["volumeMounts"] == shape["containers"][0]["volumeMounts"]
    assert pod["spec"]["securityContext"] == shape["securityContext"]
    assert "trainyard.io/run" not in pod["metadata"]["labels"]


def test_a_probe_tells_and_its_pod_goes(platform: Platform) -> None:
    cluster = Scripted({"phase": "Pending"}, {"phase": "Running"}, {"phase": "Succeeded"})
    assert probe(cluster, platform).record == TOLD
    assert [call[:2] for call in cluster.calls] == [("create", "Pod"), ("delete", "Pod")]


def bound(*statuses: Object) -> Scripted:
    """With a claim that has its volume."""
    cluster = Scripted(*statuses)
    claim = {"metadata": {"name": "trainyard-storage"}, "status": {"phase": "Bound"}}
    cluster.objects["PersistentVolumeClaim", "trainyard-storage"] = claim
    return cluster


def waiting(reason: str, message: str) -> Object:
    state = {"name": "reader", "state": {"waiting": {"reason": reason, "message": message}}}
    return {"phase": "Pending", "containerStatuses": [state]}


def test_a_probe_without_an_image_gives_up_early_and_its_pod_goes(platform: Platform) -> None:
    found = probe(bound(waiting("ErrImagePull", f'image "{IMAGE}": not found')), platform)
    assert found.finding is not None
    assert found.finding.failure == "no-such-tag"
    assert SETTLE_S < found.waited_s < 4 * SETTLE_S


def test_a_probe_without_a_node_says_nothing_of_its_image(
    good: ClusterFacts, platform: Platform
) -> None:
    unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                "message": "0/1 nodes are available: 1 Insufficient cpu."}  # fmt: skip
    cluster = bound({"phase": "Pending", "conditions": [unplaced]})
    found = checks(replace(good, probe=probe(cluster, platform)))
    assert only(found, "node").state == "failed"
    assert "no node has enough cpu" in only(found, "node").seen
    assert only(found, "image").state == "not known"


def test_a_trouble_that_goes_by_itself_is_not_believed(platform: Platform) -> None:
    trouble = waiting("ErrImagePull", "dial tcp: i/o timeout")
    cluster = bound(trouble, trouble, {"phase": "Running"}, {"phase": "Succeeded"})
    assert probe(cluster, platform).finding is None


def test_a_claim_without_a_volume_is_found_by_its_object(
    good: ClusterFacts, platform: Platform
) -> None:
    cluster = Scripted({"phase": "Pending"})
    cluster.objects["PersistentVolumeClaim", "trainyard-storage"] = {
        "metadata": {"name": "trainyard-storage"},
        "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "fast"},
        "status": {"phase": "Pending"},
    }
    found = checks(replace(good, probe=probe(cluster, platform)))
    assert only(found, "claim").state == "failed"
    assert only(found, "image").state == "not known"


# The operator.


class Operated(FakeCluster):
    """With an operator that takes so many looks."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def get(self, kind: str, name: str) -> Object | None:
        found = super().get(kind, name)
        self.looks -= 1
        if found is not None and self.looks < 0:
            found["status"] = {"jobDeploymentStatus": "Suspended"}
        return found


@pytest.mark.parametrize(("looks", "answered_s"), [(0, 2.0), (1_000, float("inf"))])
def test_a_suspended_rayjob_tells_whether_an_operator_is_there_and_goes(
    platform: Platform, looks: int, answered_s: float
) -> None:
    cluster, seconds = Operated(looks), iter(range(10_000))
    found = try_operator(
        cluster, platform, clock=lambda: float(next(seconds)), sleep=lambda _: None
    )
    assert found == answered_s
    assert [call[:2] for call in cluster.calls] == [("create", "RayJob"), ("delete", "RayJob")]


def test_the_rayjob_that_tries_the_operator_breaks_no_rule(platform: Platform) -> None:
    assert [one for one in check(suspended_job(platform), "1.6") if one.severity == "error"] == []


# The API server's answers.


class Strict(FakeCluster):
    """Refuses all but a few kinds."""

    def version(self) -> Object:
        return {"gitVersion": "v1.34.4"}

    def can_i(self, verb: str, kind: str, subresource: str = "") -> bool:
        return kind == "RayJob"

    def list(self, kind: str, *more: Any, **how: Any) -> list[Object]:
        if kind in ("RayJob", "Pod") and not how.get("everywhere"):
            return super().list(kind, *more, **how)
        raise ClusterError("no", reason="NoSuchKind" if kind == "RayCluster" else "Forbidden")


def test_a_survey_tells_what_may_not_be_read_from_what_is_not_there() -> None:
    facts = survey(Strict())
    assert facts.missing_kinds == ("RayCluster",)
    assert (facts.operators, facts.nodes, facts.quotas) == (None, None, None)
    assert facts.rights["RayJob", "", "create"] is True
    assert facts.rights["Pod", "", "create"] is False


def test_a_silent_cluster_is_told_by_its_own_words() -> None:
    class Silent(Strict):
        def version(self) -> Object:
            raise ClusterUnreachable("the cluster at x does not answer", "timed out")

    assert survey(Silent()).silence == "the cluster at x does not answer timed out"


# Quotas.


def quota(**hard: tuple[str, str]) -> Object:
    names = {key: key.replace("_", ".") for key in hard}
    return {
        "metadata": {"name": "compute"},
        "spec": {},
        "status": {
            "hard": {names[key]: value for key, (value, _) in hard.items()},
            "used": {names[key]: used for key, (_, used) in hard.items()},
        },
    }


def test_a_quota_is_held_against_head_and_workers_together(job: Object) -> None:
    # Head and workers have 4 GiB each, and the head a little for each worker.
    assert list(over_quota(job, [quota(pods=("3", "0"), limits_memory=("13Gi", "0"))])) == []
    (line,) = over_quota(job, [quota(pods=("3", "1"), limits_memory=("13Gi", "0"))])
    assert line == "ResourceQuota compute: the run needs pods 3, 2 of 3 are left"
    (line,) = over_quota(job, [quota(requests_memory=("12Gi", "2Gi"))])
    assert "requests.memory 12.0" in line
    assert "10 GiB of 12Gi are left" in line


def test_a_quota_of_some_pods_only_is_left_out(job: Object) -> None:
    scoped = quota(pods=("0", "0"))
    scoped["spec"] = {"scopes": ["BestEffort"]}
    assert list(over_quota(job, [scoped])) == []
