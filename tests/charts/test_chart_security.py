"""Every pod of the chart satisfies Pod Security "restricted", and holds no token."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.charts.helm_chart import environment, of_kind, only, pods_of, render
from tests.charts.pod_security import violations
from trainyard.cluster.kinds import kind_of
from trainyard.diagnosis.preflight.facts import RIGHTS

GOOD: dict[str, Any] = {
    "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [
        {
            "name": "c",
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            },
        }
    ],
    "volumes": [{"name": "v", "emptyDir": {}}],
}
UNSET = object()


def test_every_pod_passes_the_restricted_profile(objects):
    pods = pods_of(objects)
    assert len(pods) == 7
    found = {place: violations(pod["spec"]) for place, pod in pods.items()}
    assert not any(found.values()), found


def test_no_pod_mounts_a_token(objects):
    assert only(objects, "ServiceAccount")["automountServiceAccountToken"] is False
    for place, pod in pods_of(objects).items():
        assert pod["spec"]["automountServiceAccountToken"] is False, place
        assert "projected" not in str(pod["spec"]["volumes"]), place


def test_the_cronjob_of_messages_may_list_rayjobs_and_nothing_else():
    values = {"notify": {"secret": {"name": "chat", "key": "url"}, "watch": {"enabled": True}}}
    objects = render(values)
    name = "trainyard-notices"
    assert of_kind(objects, "Role")[name]["rules"] == [
        {"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["list"]}
    ]
    (subject,) = of_kind(objects, "RoleBinding")[name]["subjects"]
    assert (subject["kind"], subject["name"]) == ("ServiceAccount", name)
    pods = pods_of(objects)
    assert violations(pods[name]["spec"]) == []
    with_token = [key for key, pod in pods.items() if pod["spec"]["automountServiceAccountToken"]]
    assert with_token == [name]
    assert pods[name]["spec"]["serviceAccountName"] == name
    reference = {"secretKeyRef": {"name": "chat", "key": "url", "optional": True}}
    assert environment(pods[name])["TRAINYARD_NOTIFY_URL"] == reference
    (container,) = pods[name]["spec"]["containers"]
    assert container["args"] == ["--secret=chat/url"]


def test_the_cronjob_of_progress_may_list_rayjobs_and_change_one_config_map():
    objects = render({"monitoring": {"progress": {"enabled": True}}})
    name = "trainyard-progress"
    assert of_kind(objects, "Role")[name]["rules"] == [
        {"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["list"]},
        {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": [name],
            "verbs": ["patch"],
        },
    ]
    pods = pods_of(objects)
    assert violations(pods[name]["spec"]) == []
    with_token = [key for key, pod in pods.items() if pod["spec"]["automountServiceAccountToken"]]
    assert with_token == [name]
    (container,) = pods[name]["spec"]["containers"]
    assert container["args"] == [name]
    # Helm leaves the data of the ConfigMap alone, which the CronJob writes.
    assert "data" not in of_kind(objects, "ConfigMap")[name]


def test_root_file_systems_are_read_only_with_room_in_tmp_and_home(objects):
    for place, pod in pods_of(objects).items():
        container = pod["spec"]["containers"][0]
        scratch = {one["name"] for one in pod["spec"]["volumes"] if "emptyDir" in one}
        writable = {one["mountPath"] for one in container["volumeMounts"] if one["name"] in scratch}
        assert container["securityContext"]["readOnlyRootFilesystem"] is True, place
        assert writable == {"/tmp", "/home/trainyard"}, place
        assert {"name": "HOME", "value": "/home/trainyard"} in container["env"], place


def test_pods_run_as_one_numeric_user(objects):
    for place, pod in pods_of(objects).items():
        context = pod["spec"]["securityContext"]
        ids = [context[key] for key in ("runAsUser", "runAsGroup", "fsGroup")]
        assert ids == [1000, 1000, 1000], place


def test_ray_asks_for_a_token(objects, platform):
    assert platform["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert only(objects, "RayCluster")["spec"]["authOptions"] == {"mode": "token"}


def rights_of(role: dict[str, Any]) -> dict[str, list[str]]:
    return {
        f"{group or 'core'}/{resource}": sorted(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def test_the_launcher_may_do_what_it_needs_and_no_more(on_claim):
    assert rights_of(only(on_claim, "Role")) == {
        "ray.io/rayjobs": ["create", "delete", "get", "list", "patch", "watch"],
        "ray.io/rayclusters": ["get", "list", "watch"],
        "core/pods": ["create", "delete", "get", "list", "watch"],
        "core/pods/log": ["get"],
        "core/pods/exec": ["create", "get"],
        "core/pods/portforward": ["create", "get"],
        "core/events": ["get", "list", "watch"],
        "core/configmaps": ["get"],
        "core/persistentvolumeclaims": ["get"],
        "core/secrets": ["get"],
        "core/resourcequotas": ["get", "list"],
        "kueue.x-k8s.io/localqueues": ["get"],
        "kueue.x-k8s.io/workloads": ["get", "list", "patch"],
        "visibility.kueue.x-k8s.io/localqueues/pendingworkloads": ["get"],
    }


def test_preflight_asks_for_nothing_that_the_role_lacks(on_claim):
    rights = rights_of(only(on_claim, "Role"))
    for kind, part, verb in RIGHTS:
        place = kind_of(kind)
        resource = f"{place.group or 'core'}/{place.plural}" + (f"/{part}" if part else "")
        assert verb in rights[resource], (kind, part, verb)


def test_the_whole_cluster_is_read_only_by_those_who_may(on_claim):
    assert "ClusterRole" not in [one["kind"] for one in on_claim]
    subjects = [{"kind": "Group", "name": "vision"}]
    objects = render(
        {"launcher": {"rbac": {"subjects": subjects}, "clusterRbac": {"create": True}}}
    )
    assert rights_of(only(objects, "ClusterRole")) == {
        "core/nodes": ["get", "list"],
        "core/pods": ["get", "list"],
        "ray.io/rayjobs": ["get", "list"],
        "coordination.k8s.io/leases": ["get", "list"],
        "apiextensions.k8s.io/customresourcedefinitions": ["get"],
    }
    binding = only(objects, "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == only(objects, "ClusterRole")["metadata"]["name"]
    # Two namespaces may each have a release with its own people.
    assert binding["metadata"]["name"].endswith("team-vision")
    assert binding["subjects"][0]["name"] == "vision"


def test_nobody_is_bound_until_named(on_claim):
    assert "RoleBinding" not in [one["kind"] for one in on_claim]


def test_subjects_get_the_launchers_role():
    subjects = [
        {"kind": "User", "name": "ada"},
        {"kind": "ServiceAccount", "name": "ci"},
        {"kind": "ServiceAccount", "name": "ci", "namespace": "pipelines"},
    ]
    objects = render({"launcher": {"rbac": {"subjects": subjects}}})
    binding = only(objects, "RoleBinding")
    assert binding["roleRef"]["name"] == only(objects, "Role")["metadata"]["name"]
    assert binding["subjects"] == [
        {"kind": "User", "name": "ada", "apiGroup": "rbac.authorization.k8s.io"},
        {"kind": "ServiceAccount", "name": "ci", "namespace": "team-vision"},
        {"kind": "ServiceAccount", "name": "ci", "namespace": "pipelines"},
    ]


def test_the_checker_accepts_a_restricted_pod():
    assert violations(GOOD) == []


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("hostNetwork", True, "hostNetwork"),
        ("hostPID", True, "hostPID"),
        ("volumes.0.hostPath", {"path": "/"}, "volume v"),
        ("securityContext.runAsNonRoot", UNSET, "c: runAsNonRoot"),
        ("securityContext.runAsUser", 0, "c: runAsUser"),
        ("securityContext.seccompProfile", UNSET, "c: seccompProfile"),
        ("securityContext.sysctls", [{"name": "kernel.msgmax"}], "sysctl kernel.msgmax"),
        ("container.seccompProfile", {"type": "Unconfined"}, "c: seccompProfile"),
        ("container.runAsNonRoot", False, "c: runAsNonRoot"),
        ("container.privileged", True, "c: privileged"),
        ("container.capabilities.drop", UNSET, "c: capabilities.drop"),
        ("container.capabilities.add", ["SYS_PTRACE"], "c: capabilities.add"),
        ("container.allowPrivilegeEscalation", UNSET, "c: allowPrivilegeEscalation"),
        ("container.procMount", "Unmasked", "c: procMount"),
        ("containers.0.ports", [{"hostPort": 80}], "c: hostPort"),
    ],
)  # fmt: skip
def test_the_checker_names_each_violation(path, value, expected):
    spec = copy.deepcopy(GOOD)
    path = path.replace("container.", "containers.0.securityContext.")
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = spec
    for part in parents:
        place = place[part]
    if value is UNSET:
        del place[last]
    else:
        place[last] = value
    assert violations(spec) == [expected]
