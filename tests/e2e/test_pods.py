"""What the platform and a run file set for pods reaches the pods of a run: variables, Secrets, volumes,
labels, containers, scheduling."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Object, Team, get, kubectl, wait_for

PRIORITY = "trainyard-e2e-pods"
MOUNTS: list[Object] = [
    {"name": "company-ca", "mountPath": "/etc/company-ca", "readOnly": True},
    {"name": "scratch", "mountPath": "/scratch"},
]
POD: Object = {
    "env": {"TEAM": "vision", "POOL": "none"},
    "envFrom": [{"secretRef": {"name": "hub"}}],
    "volumes": [
        {"name": "company-ca", "configMap": {"name": "company-ca"}},
        {"name": "scratch", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
    ],
    "volumeMounts": MOUNTS,
    "labels": {"example.com/team": "vision"},
    "annotations": {"example.com/mesh": "off"},
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "kubernetes.io/os", "operator": "Exists"}]}
                ]
            }
        }
    },
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"example.com/team": "vision"}},
        }
    ],
    "priorityClassName": PRIORITY,
    "dnsConfig": {"options": [{"name": "ndots", "value": "2"}]},
    "hostAliases": [{"ip": "198.18.0.9", "hostnames": ["license.example"]}],
    "patch": {"spec": {"securityContext": {"supplementalGroups": [5000]}}},
}
RUN: Object = {
    "env": {"WANDB_MODE": "offline"},
    "secrets": {"WANDB_API_KEY": {"name": "wandb", "key": "token"}},
    "volumes": ["small"],
    "labels": {"example.com/project": "digits"},
    "annotations": {"example.com/owner": "ada"},
}
"""What the run file sets."""

UNTIL_SIGTERM = ["bash", "-c", "trap exit TERM; sleep infinity & wait"]
"""A sidecar's command that ends at SIGTERM. A plain `sleep` ignores it as process 1 of its container."""

CANARIES = ("canary-7d1f", "canary-90ce")
"""The contents of the Secrets."""

SCRIPT = """
import json, os, pathlib, ray, socket

def facts():
    return {
        "variables": {
            name: os.environ.get(name)
            for name in ("TEAM", "POOL", "HF_TOKEN", "WANDB_MODE", "WANDB_API_KEY")
        },
        "data": pathlib.Path("/data/small/rows.csv").read_text(),
        "certificate": pathlib.Path("/etc/company-ca/ca.pem").read_text(),
        "fetched": pathlib.Path("/scratch/fetched").read_text(),
        "license server": socket.gethostbyname("license.example"),
        "groups": os.getgroups(),
    }

ray.init()
print("HEAD", json.dumps(facts()))
print("WORKER", json.dumps(ray.get(ray.remote(facts).remote())))
"""


@pytest.fixture(scope="module")
def team(
    make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Team]:
    """A team whose platform sets all keys of `pod` that this machine can have."""
    team = make_team("pods")
    here = ("--namespace", team.namespace)
    kubectl("create", "secret", "generic", "hub", f"--from-literal=HF_TOKEN={CANARIES[0]}", *here)
    kubectl("create", "secret", "generic", "wandb", f"--from-literal=token={CANARIES[1]}", *here)
    kubectl("create", "configmap", "small", "--from-literal=rows.csv=1,2", *here)
    kubectl("delete", "priorityclass", PRIORITY, "--ignore-not-found")
    kubectl("create", "priorityclass", PRIORITY, "--value=1")
    kubectl("create", "configmap", "company-ca", "--from-literal=ca.pem=certificate", *here)
    command = {"command": ["sh", "-c", "echo fetched > /scratch/fetched"]}
    containers = {
        "initContainers": [
            {"name": "fetch", "image": team.image, **command, "volumeMounts": MOUNTS}
        ],
        "sidecars": [{"name": "exporter", "image": team.image, "command": UNTIL_SIGTERM}],
    }
    team.install(
        tmp_path_factory.mktemp("values"),
        pod={**POD, **containers},
        head__pod={"env": {"POOL": "head"}},
        data={"volumes": {"small": {"configMap": {"name": "small"}, "mountPath": "/data/small"}}},
        runs={"secrets": ["wandb"], "labels": ["example.com/*"]},
        pools__cpu__pod={"env": {"POOL": "cpu"}, "annotations": {"example.com/pool": "cpu"}},
    )
    yield team
    kubectl("delete", "priorityclass", PRIORITY)


def submit(team: Team, folder: Path) -> Object:
    """Submit a program that prints what it sees on the head and on a worker; return both."""
    run_file = {"name": "facts", "resources": {"workers": 1}, "command": ["python", "-c", SCRIPT]}
    (folder / "facts.yaml").write_text(json.dumps(run_file | RUN))
    ended = team.trainyard("submit", str(folder / "facts.yaml"))
    assert ended.returncode == 0, ended.stderr
    lines = [line.partition(" ") for line in team.trainyard("logs", "facts").stdout.splitlines()]
    return {name: json.loads(rest) for name, _, rest in lines if name in ("HEAD", "WORKER")}


def test_what_the_platform_sets_for_pods_reaches_the_head_and_the_workers_of_a_run(
    team: Team, tmp_path: Path
) -> None:
    seen = submit(team, tmp_path)
    for place, pool in (("HEAD", "head"), ("WORKER", "cpu")):
        facts = seen[place]
        assert facts["variables"] == {
            "TEAM": "vision",
            "POOL": pool,
            "HF_TOKEN": CANARIES[0],
            "WANDB_MODE": "offline",
            "WANDB_API_KEY": CANARIES[1],
        }
        assert facts["data"] == "1,2"
        assert facts["certificate"] == "certificate"
        assert facts["fetched"] == "fetched\n"
        assert facts["license server"] == "198.18.0.9"
        assert 5000 in facts["groups"]
    (head,) = team.pods(node_type="head")
    spec, metadata = head["spec"], head["metadata"]
    assert metadata["labels"]["example.com/team"] == "vision"
    assert metadata["annotations"]["example.com/mesh"] == "off"
    assert metadata["labels"]["example.com/project"] == "digits"
    assert metadata["annotations"]["example.com/owner"] == "ada"
    assert spec["priorityClassName"] == PRIORITY
    assert spec["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"
    assert spec["dnsConfig"]["options"] == POD["dnsConfig"]["options"]
    assert {one["name"] for one in head["status"]["containerStatuses"]} >= {"exporter"}


def test_the_contents_of_secrets_are_in_no_object_and_no_file_of_a_run(
    team: Team, tmp_path: Path
) -> None:
    objects = kubectl(
        "get", "rayjobs,rayclusters,pods,configmaps", "-n", team.namespace, "-o", "yaml"
    )
    copied = team.trainyard("cp", "facts:", f"{tmp_path / 'facts'}")
    assert copied.returncode == 0, copied.stderr
    # The program itself prints them; nothing else may do so.
    texts = {
        file.name: file.read_text(errors="replace")
        for file in (tmp_path / "facts").rglob("*")
        if file.is_file() and file.suffix != ".log"
    }
    assert "run.json" in texts
    for canary in CANARIES:
        assert canary not in objects
        assert not [name for name, text in texts.items() if canary in text]


def test_a_pod_that_leaves_restricted_is_refused_by_the_namespace_and_explained(
    team: Team, tmp_path: Path
) -> None:
    """Install it in the last test of the file: the platform stays so."""
    host = {"volumes": [{"name": "logs", "hostPath": {"path": "/var/log"}}]}
    team.install(tmp_path, pod=host)
    made = team.trainyard(
        *("submit", "examples/digits.yaml", "--name", "host", "--workers", "1", "--detach")
    )
    assert made.returncode == 0, made.stderr
    said = wait_for(
        "explain names Pod Security",
        lambda: (out := team.trainyard("explain", "host").stdout) and "PodSecurity" in out and out,
    )
    assert "restricted" in said
    assert not get("pods", team.namespace, "-l", "trainyard.io/run=host")["items"]
