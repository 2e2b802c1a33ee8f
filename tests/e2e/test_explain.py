"""Runs that fail for many reasons on a real cluster, and the cause that `explain` finds for each."""

from __future__ import annotations

import copy
import json
import re
import shlex
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, Object, Team, get, kubectl, wait_for

from trainyard.planning.merge import merge
from trainyard.planning.plan import plan_run
from trainyard.planning.render import render_job
from trainyard.platform import Platform, platform_of_config_map
from trainyard.run_file.load import load_run

DIGITS = ROOT / "examples/digits.yaml"
PAUSE = "localhost/pause:1"
"""An image that is present on the node of tests/cluster and contains only one program."""
FAKE = "trainyard-e2e-fake"
PLACE = "trainyard.io/e2e-place"
ONE_POD = "trainyard-e2e-one-pod"
BATCHES = "import torch; list(torch.utils.data.DataLoader(torch.zeros(9, 2**20), num_workers=1))"
"""A program that sends tensors of 4 MiB through shared memory."""
BEAT_S = 10.0
EXPLAINED_S = 240.0

Edit = Callable[[Object], None]


def pod_specs(job: Object) -> list[Object]:
    """Return the pod specs of the head and of the workers."""
    shape = job["spec"]["rayClusterSpec"]
    groups = [shape["headGroupSpec"], *shape["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def both(**changes: Any) -> Edit:
    """Return an edit of the pod specs of the head and the workers."""

    def edit(job: Object) -> None:
        for spec in pod_specs(job):
            spec.update(copy.deepcopy(changes))

    return edit


def container(index: int, **changes: Any) -> Edit:
    """Return an edit of the Ray container of the head (0) or of the workers (1)."""

    def edit(job: Object) -> None:
        pod_specs(job)[index]["containers"][0].update(copy.deepcopy(changes))

    return edit


def spec(**changes: Any) -> Edit:
    return lambda job: job["spec"].update(copy.deepcopy(changes))


def shape(**changes: Any) -> Edit:
    return lambda job: job["spec"]["rayClusterSpec"].update(copy.deepcopy(changes))


def image(name: str) -> Edit:
    def edit(job: Object) -> None:
        for pod in pod_specs(job):
            pod["containers"][0]["image"] = name

    return edit


def claim(name: str) -> Edit:
    def edit(job: Object) -> None:
        for pod in pod_specs(job):
            (volume,) = [one for one in pod["volumes"] if one["name"] == "storage"]
            volume["persistentVolumeClaim"]["claimName"] = name

    return edit


def secret_variable(secret: str, key: str) -> Edit:
    """Return an edit that adds a variable from a Secret to all containers."""

    def edit(job: Object) -> None:
        source = {"secretKeyRef": {"name": secret, "key": key}}
        for pod in pod_specs(job):
            pod["containers"][0]["env"].append({"name": "KEY", "valueFrom": source})

    return edit


def memory(index: int, amount: str, cpus: str = "1") -> Edit:
    """Return an edit of the memory of a Ray container, as request and limit, and of its CPU limit."""
    sizes = {"cpu": "10m", "memory": amount}
    limits = {"cpu": cpus, "memory": amount}
    return container(index, resources={"requests": sizes, "limits": limits})


def on_fake(**requests: str) -> Edit:
    """Return an edit that assigns the head and the workers to the fake node."""
    place = {"nodeSelector": {PLACE: "fake"}}
    tolerations = [{"key": FAKE, "operator": "Exists"}]

    def edit(job: Object) -> None:
        both(**place, tolerations=tolerations)(job)
        for pod in pod_specs(job)[1:]:
            for kind in ("requests", "limits"):
                pod["containers"][0]["resources"][kind].update(requests)

    return edit


def and_then(*edits: Edit) -> Edit:
    def edit(job: Object) -> None:
        for one in edits:
            one(job)

    return edit


def ports_without_dashboard(job: Object) -> None:
    (ports,) = [pod_specs(job)[0]["containers"][0]["ports"]]
    ports[0]["name"] = "web"


def tiny_volume(name: str, mount: str = "", medium: str = "") -> Edit:
    """Return an edit that gives the head a very small volume, in place of another one at the same path."""

    def edit(job: Object) -> None:
        head = pod_specs(job)[0]
        room = {"name": name, "emptyDir": {"sizeLimit": "1Mi", "medium": medium}}
        head["volumes"] = [one for one in head["volumes"] if one["name"] != name] + [room]
        if mount:
            head["containers"][0]["volumeMounts"].append({"name": name, "mountPath": mount})

    return edit


def own_commands(job: Object) -> None:
    """Let the containers run their own commands instead of those that KubeRay would set."""
    job["metadata"].setdefault("annotations", {})["ray.io/overwrite-container-cmd"] = "true"


def head_command(command: str) -> Edit:
    """Return an edit with which the head runs this command instead of Ray, and its probes succeed."""
    is_well = {"exec": {"command": ["true"]}}
    runs = container(
        0, command=["bash", "-c", command], livenessProbe=is_well, readinessProbe=is_well
    )
    return and_then(own_commands, runs)


def worker_command(*command: str) -> Edit:
    """Return an edit with which the workers run this command, and the head runs Ray."""
    head = container(0, command=["bash", "-c", "--"], args=["exec $KUBERAY_GEN_RAY_START_CMD"])
    return and_then(own_commands, head, container(1, command=list(command)))


def greedy_python(job: Object) -> None:
    """Let each Python process in the workers' pods allocate half a gigabyte at its start.

    They wait for the head by Ray's own program, as in an image that was not made by trainyard's Dockerfile.
    """
    worker = pod_specs(job)[1]
    worker["volumes"].append({"name": "greedy", "configMap": {"name": "greedy"}})
    ray = worker["containers"][0]
    ray["volumeMounts"].append({"name": "greedy", "mountPath": "/greedy"})
    ray["env"].append({"name": "PYTHONPATH", "value": "/greedy"})
    ray["env"].append({"name": "PATH", "value": "/opt/trainyard/bin:/usr/local/bin:/usr/bin:/bin"})


def own_disks(job: Object) -> None:
    """Put the folders of runs on a disk that is local to each pod."""
    for pod in pod_specs(job):
        (volume,) = [one for one in pod["volumes"] if one["name"] == "storage"]
        del volume["persistentVolumeClaim"]
        volume["emptyDir"] = {}


def suspended(job: Object) -> None:
    """Suspend the RayJob, with the settings that KubeRay requires."""
    job["spec"].pop("deletionStrategy", None)
    job["spec"].update(suspend=True, shutdownAfterJobFinishes=True)


@dataclass(frozen=True)
class Case:
    """A way to make a run fail, and the expected explanation."""

    name: str
    edit: Edit
    failure: str
    says: str
    namespace: str = "explain"
    ray: bool = False
    """Whether Ray must run in the head, which uses memory."""
    workers: int = 0
    """The number of workers. Each one requests 200m of CPU for the operator's init container."""


CASES = (
    # Failures of images.
    Case("no-tag", image("127.0.0.1:5000/trainyard:none"), "no-such-tag", "there is no image"),
    Case("no-registry", image("registry.invalid/x:1"), "image-unreachable", "do not reach"),
    Case("no-bash", image(PAUSE), "no-shell", "lacks a program"),
    # Failures of nodes.
    Case("no-gpus", container(1, resources={"limits": {"nvidia.com/none": "2"}}),
         "gpu-resource-name", "nvidia.com/none, which no node offers", workers=1),
    Case("few-gpus", on_fake(**{"nvidia.com/gpu": "2"}), "too-few-gpus", "asks for 2 nvidia.com/gpu",
         workers=1),
    Case("tainted", both(nodeSelector={PLACE: "fake"}), "taints", "a taint that it"),
    Case("no-nodes", both(nodeSelector={"nowhere": "yes"}), "no-such-nodes", "nowhere=yes"),
    Case("too-large", memory(0, "900Gi"), "too-little-cpu-or-memory", "900Gi memory"),
    # Failures of storage.
    Case("no-claim", claim("no-such-claim"), "claim-missing", "no-such-claim"),
    Case("no-class", claim("no-class"), "wrong-storage-class", "storage class nowhere"),
    Case("no-volume", claim("no-volume"), "claim-unbound", "900Gi"),
    Case("one-pod", and_then(claim("one-pod"), head_command("sleep 900")), "access-mode",
         "only one", workers=1),
    # Pods that are not created.
    Case("no-quota", lambda job: None, "resource-quota", "compute", "explain-quota"),
    Case("no-sizes", container(0, resources={}), "quota-needs-sizes", "must specify", "explain-sizes"),
    Case("no-room", lambda job: None, "limit-range", "maximum memory usage", "explain-limits"),
    Case("insecure", container(0, securityContext={"privileged": True}), "pod-security", "restricted"),
    Case("nobody", both(serviceAccountName="nobody"), "service-account-missing", "nobody"),
    Case("no-class-of-priority", both(priorityClassName="none"), "priority-class-missing", "none"),
    Case("upgrade", shape(upgradeStrategy={"type": "Recreate"}), "invalid-cluster", "refuses"),
    Case("no-dashboard", ports_without_dashboard, "no-dashboard-port", "dashboard"),
    # Pods that do not start.
    Case("no-secret", secret_variable("no-such-secret", "KEY"), "secret-missing", "no-such-secret"),
    Case("no-key", secret_variable("half", "OTHER"), "secret-missing", "has no key OTHER"),
    Case("no-token", shape(authOptions={"mode": "token", "secretName": "no-token"}),
         "token-secret-missing", "no-token"),
    Case("crash", lambda job: job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update(
        {"no-such-option": "1"}), "container-crash", "keeps ending, or cannot be started"),
    Case("small-head", memory(0, "64Mi"), "head-oom", "memory limit of 64Mi"),
    Case("greedy", and_then(greedy_python, head_command("sleep 900")), "init-container-oom",
         "256Mi", workers=1),
    Case("small-disk", and_then(tiny_volume("tmp"), head_command("head -c 5M /dev/zero > /tmp/x; sleep 900")),
         "evicted-disk", "ran out of disk"),
    # Failures reported by KubeRay.
    Case("invalid", spec(suspend=True, shutdownAfterJobFinishes=False, ttlSecondsAfterFinished=0),
         "validation-failed", "not allowed to be suspended"),
    Case("waits", suspended, "suspended", "is suspended"),
    Case("too-late", and_then(spec(activeDeadlineSeconds=30), both(nodeSelector={"nowhere": "yes"})),
         "no-such-nodes", "nowhere=yes"),
    Case("never", and_then(spec(preRunningDeadlineSeconds=30, backoffLimit=0), image("127.0.0.1:5000/x:1")),
         "no-such-tag", "127.0.0.1:5000/x:1"),
    # Failures of the program.
    Case("code", spec(entrypoint="python -c 'import json; json.loads(str())'", backoffLimit=0),
         "user-code", "JSONDecodeError", ray=True),
    Case("no-python", spec(entrypoint="python9 -m trainyard_trainer", backoffLimit=0),
         "missing-python", "python", ray=True),
    Case("surroundings", spec(runtimeEnvYAML="pip: 5"),
         "runtime-env", "could not start the driver", ray=True),
)  # fmt: skip

ALONE = (
    Case("other-ray", shape(rayVersion="2.59.0"), "wrong-ray-version", "rayVersion 2.59.0", ray=True),
    Case("own-disks", and_then(own_disks, memory(0, "3Gi"), memory(1, "2Gi", cpus="2"), spec(backoffLimit=0)),
         "node-local-storage", "no shared volume", ray=True, workers=1),
    Case("large-worker", worker_command("python", "-c", "held = b'x' * 2**32"), "worker-oom",
         "memory limit of 1500Mi", ray=True, workers=1),
    Case("small-shm", and_then(tiny_volume("shared-mem", "/dev/shm", "Memory"),
         spec(entrypoint=f"python -c '{BATCHES}'", backoffLimit=0)), "shared-memory", "/dev/shm", ray=True),
)  # fmt: skip
"""Cases that start Ray, and therefore run alone on the machine."""

LONG = ("small-disk", "own-disks")
"""Cases that take minutes."""


def params(cases: Sequence[Case]) -> list[Any]:
    marks = dict.fromkeys(LONG, pytest.mark.full)
    return [pytest.param(case, id=case.name, marks=marks.get(case.name, ())) for case in cases]


def broken(case: Case, platform: Platform, namespace: str) -> Object:
    """Return the RayJob of a run with one worker and the defect of the case."""
    plan = plan_run(load_run(DIGITS, workers="1", name=case.name), platform, namespace)
    job = merge(render_job(plan), platform, plan)
    # Small enough that all pods fit on the node at the same time.
    for index in (0, 1):
        memory(index, "1500Mi" if case.ray else "64Mi")(job)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    group.update(dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), case.workers))
    case.edit(job)
    return job


def let_go(namespace: str) -> None:
    """Delete all RayJobs and their pods, even if their deletion would hang.

    This happens with jobs that never got a token, and with pods on a node without a machine.
    """
    kubectl("delete", "rayjobs.ray.io", "--all", "-n", namespace, "--wait=false")
    free = json.dumps({"metadata": {"finalizers": None}})
    for job in get("rayjobs.ray.io", namespace)["items"]:
        if job["metadata"]["labels"]["trainyard.io/run"] in ("no-token", "upgrade"):
            name = job["metadata"]["name"]
            kubectl("patch", "rayjob", name, "-n", namespace, "--type", "merge", "-p", free)
    kubectl("delete", "pods", "--all", "-n", namespace, "--force", "--grace-period=0")


@pytest.fixture(scope="module")
def teams(
    make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Team]]:
    """Namespaces with the platform, or at least with the service account of its pods, and with obstacles."""
    let_go("trainyard-e2e-explain")  # what an interrupted session left
    first = make_team("explain")
    first.install(tmp_path_factory.mktemp("values"))
    teams = {"explain": first}
    obstacles = {
        "explain-quota": ("ResourceQuota", {"hard": {"pods": "0"}}),
        "explain-sizes": ("ResourceQuota", {"hard": {"limits.cpu": "10"}}),
        "explain-limits": (
            "LimitRange",
            {"limits": [{"type": "Container", "max": {"memory": "32Mi"}}]},
        ),
    }
    for name, (kind, obstacle) in obstacles.items():
        teams[name] = make_team(name)
        kubectl("create", "serviceaccount", "trainyard-run", "-n", teams[name].namespace)
        body = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "compute"}, "spec": obstacle}
        kubectl("create", "-n", teams[name].namespace, "-f", "-", stdin=json.dumps(body))
    for name, size, storage_class in (("no-class", "1Gi", "nowhere"), ("no-volume", "900Gi", "")):
        claimed: Object = {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": size}},
            "storageClassName": storage_class,
        }
        body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}}
        kubectl(
            "create", "-n", first.namespace, "-f", "-", stdin=json.dumps(body | {"spec": claimed})
        )
    kubectl("create", "secret", "generic", "half", "--from-literal=KEY=x", "-n", first.namespace)
    greedy = "--from-literal=sitecustomize.py=held = b'x' * 2**29"
    kubectl("create", "configmap", "greedy", greedy, "-n", first.namespace)
    kubectl("create", "-f", "-", stdin=yaml.safe_dump_all(volume_for_one_pod(first.namespace)))
    yield teams
    let_go(first.namespace)
    kubectl("delete", "persistentvolume", ONE_POD, "--wait=false")


def volume_for_one_pod(namespace: str) -> list[Object]:
    """Create a volume that only one pod can mount, and the claim `one-pod` that is bound to it."""
    terms: Object = {"accessModes": ["ReadWriteOncePod"], "storageClassName": ""}
    here = {"path": f"/tmp/{ONE_POD}", "type": "DirectoryOrCreate"}
    size = {"storage": "1Gi"}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": ONE_POD},
        "spec": terms | {"capacity": size, "hostPath": here},
    }
    claimed = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "one-pod", "namespace": namespace},
        "spec": terms | {"resources": {"requests": size}, "volumeName": ONE_POD},
    }
    return [volume, claimed]


class FakeNode:
    """A fake node with one GPU, which is ready as long as its lease is renewed."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)

    def __enter__(self) -> FakeNode:
        kubectl("delete", "node", FAKE, "--ignore-not-found")
        taint = {"key": FAKE, "value": "true", "effect": "NoSchedule"}
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": FAKE, "labels": {PLACE: "fake"}},
            "spec": {"taints": [taint]},
        }
        kubectl("create", "-f", "-", stdin=json.dumps(node))
        sizes = {"cpu": "8", "memory": "64Gi", "pods": "20", "nvidia.com/gpu": "1"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "fake"}
        status = {"capacity": sizes, "allocatable": sizes, "conditions": [ready]}
        kubectl("patch", "node", FAKE, "--subresource=status", "-p", json.dumps({"status": status}))
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.fall_silent()
        kubectl("delete", "node", FAKE, "--ignore-not-found")
        # No kubelet ends its pods, and the cluster deletes them only a minute after their node.
        its = f"--field-selector=spec.nodeName={FAKE}"
        kubectl("delete", "pods", "--all-namespaces", its, "--force", "--grace-period=0")

    def fall_silent(self) -> None:
        """Stop renewing the lease, as if the machine had lost its power."""
        self._stop.set()
        self._thread.join()

    def _live(self) -> None:
        while not self._stop.wait(BEAT_S):
            self._beat()

    def _beat(self) -> None:
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": FAKE, "namespace": "kube-node-lease"},
            "spec": {"holderIdentity": FAKE, "leaseDurationSeconds": 40, "renewTime": now},
        }
        kubectl("apply", "-f", "-", stdin=json.dumps(lease))


@pytest.fixture(scope="module")
def fake_node() -> Iterator[FakeNode]:
    with FakeNode() as node:
        yield node


@pytest.fixture(scope="module")
def submitted(teams: dict[str, Team], fake_node: FakeNode) -> dict[str, Team]:
    """All failing runs, created at the same time."""
    platform = platform_of_config_map(
        get("configmap", teams["explain"].namespace, "trainyard-platform"), "e2e"
    )
    for namespace, team in teams.items():
        jobs = [
            broken(case, platform, team.namespace) for case in CASES if case.namespace == namespace
        ]
        kubectl("create", "-f", "-", stdin=yaml.safe_dump_all(jobs))
    return teams


def explanation(team: Team, run: str) -> Object:
    ended = team.trainyard("explain", run, "--json")
    assert ended.returncode == 0, ended.stderr
    found: Object = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("case", params(CASES))
def test_a_broken_run_is_explained_by_its_cause(submitted: dict[str, Team], case: Case) -> None:
    wait_for_explanation(submitted[case.namespace], case)


def wait_for_explanation(team: Team, case: Case, *, is_all_read: bool = True) -> None:
    """Wait until `explain` names the failure of the case. Logs of pods on the fake node cannot be read."""
    last: Object = {}

    def is_explained() -> bool:
        nonlocal last
        last = explanation(team, case.name)
        return bool(last["finding"] and last["finding"]["failure"] == case.failure)

    what = f"{case.name} is explained as {case.failure}"
    wait_for(what, is_explained, EXPLAINED_S, seen=lambda: last)
    assert case.says in last["finding"]["cause"], last
    assert last["finding"]["evidence"]
    assert (last["unread"] == []) is is_all_read


@pytest.mark.parametrize("case", params(ALONE))
def test_a_run_that_is_broken_once_ray_has_started_is_explained(
    submitted: dict[str, Team], case: Case
) -> None:
    team = submitted[case.namespace]
    platform = platform_of_config_map(get("configmap", team.namespace, "trainyard-platform"), "e2e")
    kubectl("create", "-f", "-", stdin=yaml.safe_dump(broken(case, platform, team.namespace)))
    wait_for_explanation(team, case)
    kubectl("delete", "rayjobs", "-n", team.namespace, "-l", f"trainyard.io/run={case.name}")


def test_an_explanation_can_be_kept_as_a_file_and_names_one_remedy(
    submitted: dict[str, Team], tmp_path: Path
) -> None:
    file = tmp_path / "snapshot.yaml"
    ended = submitted["explain"].trainyard("explain", "no-tag", "--save", file)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("remedy:") == 1
    assert "make image push IMAGE=127.0.0.1:5000/trainyard:none" in ended.stdout
    assert yaml.safe_load(file.read_text())["run"] == "no-tag"


def test_the_watch_of_a_failed_run_ends_with_its_cause(submitted: dict[str, Team]) -> None:
    ended = submitted["explain"].trainyard("watch", "code")
    assert ended.returncode == 1
    assert "JSONDecodeError" in ended.stderr
    assert "trainyard explain code" in ended.stderr


def test_a_run_that_nobody_knows_is_your_input(submitted: dict[str, Team]) -> None:
    ended = submitted["explain"].trainyard("explain", "no-such-run")
    assert ended.returncode == 2
    assert "there is no run no-such-run" in ended.stderr


def test_a_deletion_that_hangs_is_explained_and_the_remedy_ends_it(
    submitted: dict[str, Team],
) -> None:
    team = submitted["explain"]
    jobs = get("rayjobs.ray.io", team.namespace, "-l", "trainyard.io/run=no-token")["items"]
    kubectl("delete", "rayjob", jobs[0]["metadata"]["name"], "-n", team.namespace, "--wait=false")

    def is_explained() -> Object | None:
        finding: Object | None = explanation(team, "no-token")["finding"]
        return finding if finding and finding["failure"] == "deletion-hangs" else None

    found = wait_for("the deletion is explained", is_explained, EXPLAINED_S)
    (command,) = re.findall(r"`kubectl (.*)`", found["remedy"])
    kubectl(*shlex.split(command))
    assert get("rayjobs.ray.io", team.namespace, "-l", "trainyard.io/run=no-token")["items"] == []


def test_a_node_that_falls_silent_is_named(submitted: dict[str, Team], fake_node: FakeNode) -> None:
    """Check this case last, because the fake node is lost after it."""
    team = submitted["explain"]
    platform = platform_of_config_map(get("configmap", team.namespace, "trainyard-platform"), "e2e")
    case = Case("silent-node", on_fake(), "node-lost", FAKE)
    kubectl("create", "-f", "-", stdin=yaml.safe_dump(broken(case, platform, team.namespace)))

    def pods() -> list[Object]:
        selector = "trainyard.io/run=silent-node"
        found: list[Object] = get("pods", team.namespace, "-l", selector)["items"]
        placed = [pod for pod in found if pod["spec"].get("nodeName")]
        return placed if len(placed) == 1 + case.workers else []

    for pod in wait_for("its pods are on the fake node", pods):
        running = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        name = pod["metadata"]["name"]
        kubectl("patch", "pod", name, "-n", team.namespace, "--subresource=status",
                "-p", json.dumps({"status": running}))  # fmt: skip
    fake_node.fall_silent()
    wait_for_explanation(team, case, is_all_read=False)
