"""Each failure of the catalogue is found in a snapshot of it, and nothing is found in a healthy run."""

from __future__ import annotations

import copy
import json
import re
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_cluster import FakeCluster, merge_patch
from typer.main import get_command

from trainyard.cli.app import app
from trainyard.diagnosis.activity import duration
from trainyard.diagnosis.catalogue import CATALOGUE, Explanation, explain
from trainyard.diagnosis.gather import gather
from trainyard.diagnosis.snapshot import Snapshot
from trainyard.diagnosis.text import explanation_lines
from trainyard.errors import ClusterError

Object = dict[str, Any]

SNAPSHOTS = Path(__file__).parent / "snapshots"
BASE = SNAPSHOTS / "base.yaml"
FILES = sorted(set(SNAPSHOTS.glob("*.yaml")) - {BASE})
NOW = datetime(2026, 11, 21, 16, 10, tzinfo=timezone.utc)


def read(path: Path) -> Object:
    found: Object = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)
    return found


def snapshot_of(file: Object) -> Snapshot:
    """A recorded snapshot, or one that is written as a change of the base."""
    plain = copy.deepcopy(file.get("snapshot") or read(BASE))
    merge_patch(plain, file.get("changes", {}))
    return Snapshot.from_plain(plain)


def base() -> Snapshot:
    return Snapshot.from_plain(read(BASE))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_snapshot_is_explained(path: Path) -> None:
    file = read(path)
    found = explain(snapshot_of(file))
    name = None if found.finding is None else found.finding.failure
    assert name == file["failure"], list(explanation_lines(found))
    said = found.activity if found.finding is None else found.finding.cause
    assert file["says"] in said
    if found.finding is not None:
        assert found.finding.evidence
        assert not re.search(r"\{\w+\}", found.finding.remedy)


def test_every_failure_of_the_catalogue_has_a_snapshot() -> None:
    shown = {read(path)["failure"] for path in FILES}
    assert {known.name for known in CATALOGUE} - shown == set()


def test_names_in_the_catalogue_are_unique() -> None:
    names = [known.name for known in CATALOGUE]
    assert len(set(names)) == len(names) >= 25


def commands() -> set[str]:
    """`status`, `checkpoints prune`: every command there is."""
    root = get_command(app)
    names = set()
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        names.add(name)
        names |= {f"{name} {inner}" for inner in getattr(command, "commands", {})}
    return names


@pytest.mark.parametrize("known", CATALOGUE, ids=lambda known: known.name)
def test_a_remedy_names_commands_that_exist(known: Any) -> None:
    for word, option in re.findall(r"`trainyard (\w+)(?: (\w+))?", known.remedy):
        assert word in commands() or f"{word} {option}" in commands()


def test_placeholders_of_a_remedy_are_always_known() -> None:
    always = {"run", "namespace", "submission"}
    own = {known.name: known.placeholders - always for known in CATALOGUE}
    for path in FILES:
        file = read(path)
        if file["failure"] is None:
            continue
        snapshot = snapshot_of(file)
        (known,) = [known for known in CATALOGUE if known.name == file["failure"]]
        match = known.detect(snapshot)
        assert match is not None
        assert own[known.name] <= set(match.values)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0 s"), (59, "59 s"), (3599, "59 min"), (11_520, "3 h 12 min"), (190_000, "2 d 4 h")],
)
def test_a_duration_is_said_in_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_cause_beats_what_follows_from_it() -> None:
    order = [known.name for known in CATALOGUE]
    for cause, symptom in [
        ("missing-crd", "no-operator"),
        ("wrong-storage-class", "claim-unbound"),
        ("claim-unbound", "unschedulable"),
        ("taints", "unschedulable"),
        ("too-few-gpus", "pre-running-deadline"),
        ("init-container-oom", "container-crash"),
        ("node-lost", "nccl-timeout"),
        ("diverged", "run-error"),
        ("s3-denied", "storage-unusable"),
        ("node-local-storage", "overtaken"),
        ("config-error", "user-code"),
    ]:
        assert order.index(cause) < order.index(symptom)


def test_a_snapshot_survives_its_way_through_a_file() -> None:
    for path in FILES:
        snapshot = snapshot_of(read(path))
        assert Snapshot.from_plain(yaml.safe_load(yaml.safe_dump(snapshot.to_plain()))) == snapshot


def words(found: Explanation) -> str:
    return "\n".join(explanation_lines(found))


def test_an_explanation_in_words_ends_with_one_remedy() -> None:
    found = explain(snapshot_of(read(SNAPSHOTS / "worker-oom.yaml")))
    text = words(found)
    assert text.startswith("run digits (digits-1a2b3c4d): attempt 1: running for 9 min")
    assert text.count("cause:") == text.count("remedy:") == 1
    assert "OOMKilled with exit code 137" in text


def test_what_nobody_knows_is_told_with_all_that_was_said_and_what_to_send() -> None:
    text = words(explain(snapshot_of(read(SNAPSHOTS / "unknown-failure.yaml"))))
    assert "Sunspots" in text
    assert "last words" in text
    assert "--save snapshot.yaml" in text


# Gathering a snapshot.


def put(cluster: FakeCluster, kind: str, thing: Object) -> None:
    thing["metadata"].setdefault("uid", thing["metadata"]["name"])
    cluster.objects[kind, thing["metadata"]["name"]] = {"kind": kind, **thing}


class Counting(FakeCluster):
    """Counts questions, and refuses those about some kinds."""

    def __init__(self, forbidden: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.forbidden = forbidden
        self.asked: list[str] = []

    def list(self, kind: str, *more: Any, **how: Any) -> list[Object]:
        self._ask(kind)
        return super().list(kind, *more, **how)

    def get(self, kind: str, name: str) -> Object | None:
        self._ask(kind)
        return super().get(kind, name)

    def _ask(self, kind: str) -> None:
        self.asked.append(kind)
        if kind in self.forbidden:
            raise ClusterError("no", reason="Forbidden")


def starting(forbidden: tuple[str, ...] = ()) -> Counting:
    """The base's run, with a worker that finds no place beside other people's objects."""
    cluster = Counting(forbidden)
    labels = {"trainyard.io/run": "digits", "ray.io/cluster": "digits-1a2b3c4d-x7k2p"}
    unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."}  # fmt: skip
    container = {
        "name": "ray-worker",
        "env": [{"name": "PASSWORD", "value": "tell-nobody"}],
        "resources": {"limits": {"nvidia.com/gpu": "8"}},
    }
    job = read(BASE)["job"]
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"] = [
        {"name": "storage", "persistentVolumeClaim": {"claimName": "trainyard-storage"}}
    ]
    put(cluster, "RayJob", job)
    for name, its in (("digits-1a2b3c4d-x7k2p-gpu-worker-1", labels), ("other", {})):
        pod = {
            "metadata": {"name": name, "labels": its, "managedFields": [{"manager": "kubelet"}]},
            "spec": {"containers": [container]},
            "status": {"phase": "Pending", "conditions": [unplaced]},
        }
        put(cluster, "Pod", pod)
    for name in ("digits-1a2b3c4d-x7k2p-gpu-worker-1", "digits-1a2b", "other"):
        put(
            cluster,
            "Event",
            {
                "metadata": {"name": f"{name}.1"},
                "involvedObject": {"kind": "Pod", "name": name},
                "type": "Warning",
                "reason": "FailedScheduling",
                "message": "no",
                "lastTimestamp": "2026-11-21T16:01:00Z",
            },
        )
    put(cluster, "Node", {"metadata": {"name": "node-1"}, "spec": {}, "status": {}})
    return cluster


class Folder:
    """A run's folder, by the texts of its files."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts

    def logs(self) -> list[int]:
        return sorted(int(digits) for name in self.texts for digits in re.findall(r"\d+", name))

    def read(self, file: str) -> str | None:
        return self.texts.get(file)


def nothing() -> AbstractContextManager[Folder]:
    raise AssertionError("the folder was opened")


def test_a_snapshot_holds_what_belongs_to_the_run_and_no_value_of_a_variable() -> None:
    snapshot = gather(starting(), "digits", now=NOW, open_folder=nothing)
    assert [pod["metadata"]["name"] for pod in snapshot.pods] == [
        "digits-1a2b3c4d-x7k2p-gpu-worker-1"
    ]
    assert len(snapshot.events) == 1
    assert snapshot.claims == {"trainyard-storage": None}
    assert snapshot.nodes is not None
    assert "tell-nobody" not in json.dumps(snapshot.to_plain())
    assert "managedFields" not in json.dumps(snapshot.to_plain())


def test_what_a_worker_says_that_waits_for_the_head_is_looked_at() -> None:
    cluster = starting()
    (pod,) = [pod for pod in cluster.list("Pod") if "gpu-worker" in pod["metadata"]["name"]]
    running = {
        "name": "wait-gcs-ready",
        "state": {"running": {"startedAt": "2026-11-21T16:00:00Z"}},
    }
    pod["status"] = {"phase": "Pending", "initContainerStatuses": [running]}
    cluster.objects["Pod", pod["metadata"]["name"]] = pod
    cluster.logs[pod["metadata"]["name"]] = "17 Killed   ray health-check --address head:6379\n"
    assert "Killed" in gather(cluster, "digits", now=NOW, open_folder=nothing).init_log


def test_few_questions_are_asked_and_none_about_a_queue_that_there_is_not() -> None:
    cluster = starting()
    gather(cluster, "digits", now=NOW, open_folder=nothing)
    assert sorted(cluster.asked) == [
        *5 * ["Event"], "Node", "PersistentVolumeClaim", "Pod", "Pod", "RayCluster", "RayJob",
    ]  # fmt: skip


@pytest.mark.parametrize(("uid", "preemptor"), [("u2", "urgent"), ("of-another-namespace", "")])
def test_the_run_for_which_kueue_has_preempted_another_is_named(uid: str, preemptor: str) -> None:
    cluster = FakeCluster()
    job = cluster.add_job("digits-1")
    job["metadata"] |= {"uid": "u1", "creationTimestamp": "2026-11-21T16:00:00Z"}
    job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team"
    job["spec"] = {"suspend": True}
    cluster.add_job("urgent-1", run="urgent")["metadata"]["uid"] = "u2"
    message = f"Preempted to accommodate a workload (UID: w2, JobUID: {uid}) due to prioritization"
    evicted = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": message}
    labels, owners = {"kueue.x-k8s.io/job-uid": "u1"}, [{"uid": "u1"}]
    cluster.objects["Workload", "w1"] = {
        "metadata": {"name": "w1", "labels": labels, "ownerReferences": owners},
        "status": {"conditions": [evicted]},
    }
    assert gather(cluster, "digits", now=NOW, open_folder=nothing).preemptor == preemptor


def test_what_may_not_be_read_is_said_and_the_rest_is_explained() -> None:
    cluster = starting(("Node", "Event", "PersistentVolumeClaim"))
    snapshot = gather(cluster, "digits", now=NOW, open_folder=nothing)
    found = explain(snapshot)
    assert found.finding is not None
    assert found.finding.failure == "too-few-gpus"
    assert snapshot.claims == {}
    assert "Node: Forbidden" in words(found)


def test_a_run_that_may_not_be_read_at_all_is_no_run_that_is_gone() -> None:
    snapshot = gather(
        Counting(("RayJob",)), "digits", now=NOW, open_folder=lambda: nullcontext(Folder({}))
    )
    assert "may not be read" in explain(snapshot).activity


def test_a_run_whose_rayjob_is_gone_and_that_was_stopped_is_explained_so() -> None:
    error = "the run was stopped by SIGTERM; started again, it goes on from there"
    folder = Folder(
        {
            "logs/attempt-1.log": f"error: {error}\n",
            "summary.json": json.dumps({"outcome": "stopped", "error": error}),
        }
    )
    snapshot = gather(FakeCluster(), "digits", now=NOW, open_folder=lambda: nullcontext(folder))
    found = explain(snapshot)
    assert found.finding is not None
    assert found.finding.failure == "stopped-by-signal"
    assert found.activity.endswith("its folder says: stopped")


def test_where_the_rayjob_is_gone_the_folder_tells() -> None:
    folder = Folder(
        {
            "logs/attempt-2.log": "error: of an earlier attempt\n",
            "logs/attempt-10.log": "Traceback (most recent call last):\nKeyError: 1\n",
            "summary.json": '{"outcome": "failed", "error": "KeyError"}',
        }
    )
    snapshot = gather(FakeCluster(), "digits", now=NOW, open_folder=lambda: nullcontext(folder))
    found = explain(snapshot)
    assert found.finding is not None
    assert found.phase == "gone"
    assert "KeyError" in found.finding.cause
