"""Two RayJobs of a run: each change by its path, and when it would count."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_cluster import FakeCluster
from typer import Exit

from trainyard.cli.commands.inspection import platform as platform_command
from trainyard.cluster.kuberay import RayjobApi
from trainyard.errors import ClusterError, ConfigError
from trainyard.planning.comparison.platform_diff import (
    AFFECTED,
    diff_platforms,
    diff_pre_pull,
    platform_of_manifests,
    pre_pull_pods,
)
from trainyard.planning.comparison.run_diff import diff_jobs, require_same_identity
from trainyard.planning.merge import merge
from trainyard.planning.objects import run_objects
from trainyard.planning.plan import plan_run
from trainyard.planning.render import render_job
from trainyard.platform import (
    Platform,
    PlatformQueue,
    RunPermissions,
    RunVariables,
    load_platform,
    parse_platform,
)
from trainyard.run_file.load import load_run
from trainyard.submission.submit import submit_rayjob

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples/digits.yaml"
HEAD = "spec.rayClusterSpec.headGroupSpec.template.spec.containers.ray-head"
WORKER = "spec.rayClusterSpec.workerGroupSpecs.cpu.template.spec.containers.ray-worker"

Object = dict[str, Any]


def job_of(*settings: str, platform: Platform | None = None, **resources: str) -> Object:
    run = load_run(DIGITS, settings, **(resources or {"workers": "2"}))
    return run_objects(run, platform or load_platform(None), "team").job


def stored(job: Object, status: Object | None = None) -> Object:
    """The RayJob as the API server and the operator leave it."""
    job = copy.deepcopy(job)
    job["metadata"] |= {
        "uid": "0",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "generation": 3,
        "finalizers": ["ray.io/rayjob-finalizer"],
    }
    annotation = {"kubectl.kubernetes.io/last-applied-configuration": "{}"}
    job["metadata"]["annotations"] = job["metadata"].get("annotations", {}) | annotation
    spec = job["spec"]["rayClusterSpec"]
    for group in spec["workerGroupSpecs"]:
        group["numOfHosts"] = 1
    for port in spec["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]:
        port["protocol"] = "TCP"
    job["status"] = status or {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
    return job


@pytest.mark.parametrize("resources", [{"workers": "2"}, {"gpus": "16"}, {"gpus": "8:16"}])
def test_what_the_api_server_fills_in_is_no_change(resources: dict[str, str]) -> None:
    job = job_of(**resources)
    assert diff_jobs(stored(job), job, live=True) == ()


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ("2Gi", "2048Mi", True),
        ("2Gi", "2049Mi", False),
        ("100m", "0.1", True),
        ("100m", 0.1, True),
        ("2", 2, True),
        ("2", "2001m", False),
        ("odd", "odd", True),
        ("odd", "1", False),
    ],
)
def test_equal_amounts_are_no_change_however_they_are_written(
    before: Any, after: Any, is_same: bool
) -> None:
    jobs = [job_of(), job_of()]
    for job, amount in zip(jobs, (before, after), strict=True):
        (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
        group["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] = amount
    assert (diff_jobs(*jobs, live=True) == ()) == is_same


def test_what_the_operator_leaves_out_is_no_change() -> None:
    job = job_of()
    assert job["spec"]["shutdownAfterJobFinishes"] is False
    live = stored(job)
    del live["spec"]["shutdownAfterJobFinishes"]
    assert diff_jobs(live, job, live=True) == ()


@pytest.mark.parametrize(
    ("settings", "path", "before", "after", "effect"),
    [
        (["faults.retries=5"], "spec.backoffLimit", 2, 5, "at once"),
        (["faults.retries=5"], "config.faults.retries", 2, 5, "next attempt"),
        (["train.epochs=50"], "config.train.epochs", 12, 50, "next attempt"),
        (["train.epochs=3"], "config.train.epochs", 12, 3, "refused"),
        (["train.seed=1"], "config.train.seed", 0, 1, "refused"),
        (["train.compile=true"], "config.train.compile", False, True, "next attempt"),
        (["data.augment.flip=true"], "config.data.augment.flip", False, True, "refused"),
        (["data.loader=ray"], "config.data.loader", "torch", "ray", "refused"),
        (["train.early_stopping.patience_epochs=3"], "config.train.early_stopping", None, ..., "refused"),
        (["checkpoint.keep=9"], "config.checkpoint.keep", 2, 9, "next attempt"),
        (["image=other:2"], f"{HEAD}.image", ..., "other:2", "next attempt"),
        (["network.preset=tcp"], f"{WORKER}.env.NCCL_DEBUG", None, ..., "next attempt"),
        (
            ["resources.workers=4"],
            "spec.rayClusterSpec.workerGroupSpecs.cpu.replicas",
            2,
            4,
            "next attempt",
        ),
    ],
)  # fmt: skip
def test_each_change_has_its_path_and_its_effect(
    settings: list[str], path: str, before: Any, after: Any, effect: str
) -> None:
    run = load_run(DIGITS, ["resources.workers=2"])
    old = run_objects(run, load_platform(None), "team").job
    new = run_objects(
        load_run(DIGITS, ["resources.workers=2", *settings]), load_platform(None), "team"
    ).job
    (change,) = [one for one in diff_jobs(stored(old), new, live=True) if one.path == path]
    assert before in (..., change.before)
    assert after in (..., change.after)
    assert change.effect == effect
    assert change.why


def test_life_cycle_and_queue_are_told_by_when_kuberay_reads_them() -> None:
    platform = load_platform(None)
    kueue = platform.model_copy(update={"queue": PlatformQueue(system="kueue", name="team")})
    changes = {
        one.path: one.effect
        for one in diff_jobs(stored(job_of()), job_of(platform=kueue), live=True)
    }
    assert changes.pop("metadata.labels[kueue.x-k8s.io/queue-name]") == "new submission"
    assert changes.pop("spec.deletionStrategy") == "at once"
    assert changes.pop("spec.shutdownAfterJobFinishes") == "at once"
    assert changes == {}


TEMPLATE = (ROOT / "manifests/rayjob.yaml.j2").read_text()
OF_THE_RUN = "trainyard.io/run: {{ plan.run | tojson }}\n    {%- for label, value in plan."
OF_THE_JOB = f"{OF_THE_RUN}queue_labels"
OF_THE_PODS = f"{OF_THE_RUN}labels"


def job_of_template(template: str) -> Object:
    run, platform = load_run(DIGITS, workers="2"), load_platform(None)
    plan = plan_run(run, platform, "team")
    return merge(render_job(plan, template), platform, plan)


@pytest.mark.parametrize("field", ["labels", "annotations"])
@pytest.mark.parametrize("key", ["cost-center", "example.com/cost-center"])
def test_a_label_or_annotation_of_the_template_is_compared(field: str, key: str) -> None:
    def job_with(value: str | None) -> Object:
        job = job_of()
        if value is not None:
            job["metadata"].setdefault(field, {})[key] = value
        return job

    path = f"metadata.{field}[{key}]" if "/" in key else f"metadata.{field}.{key}"
    for old in (None, "a"):
        (change,) = diff_jobs(stored(job_with(old)), job_with("b"), live=True)
        assert (change.path, change.before, change.after) == (path, old, "b")
        assert change.effect == "next attempt"
    # A key that trainyard does not set comes from a controller or a user.
    assert diff_jobs(stored(job_with("a")), job_with(None), live=True) == ()


def test_a_label_with_the_prefix_of_trainyard_that_is_gone_is_compared() -> None:
    old = job_of()
    old["metadata"]["labels"]["trainyard.io/team"] = "a"
    (change,) = diff_jobs(stored(old), job_of(), live=True)
    assert (change.path, change.after) == ("metadata.labels[trainyard.io/team]", None)


OPEN_TO_RUNS = RunPermissions(secrets=("*",), labels=("*",), env=RunVariables(deny=()))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("labels={team: a}", "labels={team: b}"),
        ("labels={team: a}", None),
        (None, "labels={team: b}"),
    ],
)
@pytest.mark.parametrize("field", ["labels", "annotations"])
def test_a_label_or_annotation_of_the_run_file_is_compared_also_if_it_is_gone(
    field: str, before: str | None, after: str | None
) -> None:
    platform = load_platform(None).model_copy(update={"runs": OPEN_TO_RUNS})
    old, new = (
        job_of(*([each.replace("labels", field)] if each else []), platform=platform)
        for each in (before, after)
    )
    changes = {each.path: each for each in diff_jobs(stored(old), new, live=True)}
    job = changes[f"metadata.{field}.team"]
    assert (job.before, job.after) == ("a" if before else None, "b" if after else None)
    pod = f"spec.rayClusterSpec.headGroupSpec.template.metadata.{field}"
    assert any(path.startswith(pod) for path in changes)
    assert {each.effect for each in changes.values()} == {"next attempt"}


@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ("env.A=x", "config.env.A"),
        ("secrets.A={name: hub, key: a}", f"{HEAD}.env.A.valueFrom.secretKeyRef.name"),
        ("secrets.A={name: hub, key: a}", f"{WORKER}.env.A.valueFrom.secretKeyRef.name"),
    ],
)
def test_a_variable_of_the_run_file_counts_from_the_next_attempt_on(
    setting: str, path: str
) -> None:
    platform = load_platform(None).model_copy(update={"runs": OPEN_TO_RUNS})
    changes = diff_jobs(stored(job_of()), job_of(setting, platform=platform), live=True)
    assert {each.effect for each in changes} == {"next attempt"}
    assert any(each.path in (path, path.partition(".valueFrom")[0]) for each in changes)


def test_a_label_of_the_rayjob_is_no_label_of_its_pods() -> None:
    assert TEMPLATE.count(OF_THE_JOB) == 1
    template = TEMPLATE.replace(OF_THE_JOB, f"cost-center: vision\n    {OF_THE_JOB}")
    changes = diff_jobs(stored(job_of()), job_of_template(template), live=True)
    assert [one.path for one in changes] == ["metadata.labels.cost-center"]


def test_a_label_of_the_pods_is_no_label_of_the_rayjob() -> None:
    assert TEMPLATE.count(OF_THE_PODS) == 1
    template = TEMPLATE.replace(OF_THE_PODS, f"cost-center: vision\n    {OF_THE_PODS}")
    changes = diff_jobs(stored(job_of()), job_of_template(template), live=True)
    assert [one.path for one in changes] == [
        f"spec.rayClusterSpec.{group}.template.metadata.labels.cost-center"
        for group in ("headGroupSpec", "workerGroupSpecs.cpu")
    ]
    assert {one.effect for one in changes} == {"next attempt"}


@pytest.fixture
def admitted() -> tuple[Object, Object]:
    """A RayJob as rendered, and as it is when Kueue has admitted it."""
    platform = load_platform(None)
    kueue = platform.model_copy(update={"queue": PlatformQueue(system="kueue", name="team")})
    job = job_of(platform=kueue)
    started = stored(job)
    started["spec"]["suspend"] = False
    cluster = started["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        metadata = group["template"]["metadata"]
        metadata["labels"] |= {
            f"kueue.x-k8s.io/{key}": "a"
            for key in ("cluster-queue-name", "local-queue-name", "podset")
        }
        metadata.setdefault("annotations", {})["kueue.x-k8s.io/workload"] = "rayjob-a"
    return job, started


def test_a_job_that_kueue_has_let_start_is_unchanged(admitted: tuple[Object, Object]) -> None:
    job, started = admitted
    assert diff_jobs(started, job, live=True) == ()


def test_what_kueue_adds_for_a_flavor_has_no_effect(admitted: tuple[Object, Object]) -> None:
    job, started = admitted
    for group in started["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        pod.setdefault("nodeSelector", {})["example.com/gpu"] = "h100"
        pod.setdefault("tolerations", []).append({"key": "reserved", "operator": "Exists"})
    changes = diff_jobs(started, job, live=True)
    assert len(changes) >= 2
    assert {each.effect for each in changes} == {"no effect"}
    assert all("Kueue adds it" in each.why for each in changes)


@pytest.mark.parametrize(
    ("field", "before", "after", "effect"),
    [
        ("submissionMode", "HTTPMode", "SidecarMode", "new submission"),
        ("entrypoint", "a", "b", "next attempt"),
        ("runtimeEnvYAML", None, "a: 1", "next attempt"),
        ("activeDeadlineSeconds", None, 60, "at once"),
        ("preRunningDeadlineSeconds", 60, 61, "at once"),
        ("suspend", True, None, "at once"),
        ("jobId", "a", "b", "new submission"),
        ("managedBy", None, "kueue.x-k8s.io/multikueue", "new submission"),
    ],
)
def test_each_field_of_a_job_is_classified(
    field: str, before: Any, after: Any, effect: str
) -> None:
    old, new = job_of(), job_of()
    old["spec"][field], new["spec"][field] = before, after
    (change,) = diff_jobs(stored(old), new, live=True)
    assert (change.path, change.effect) == (f"spec.{field}", effect)
    (ended,) = diff_jobs(stored(old), new, live=False)
    assert ended.effect == "next attempt"


def test_text_that_is_no_config_is_compared_as_it_stands() -> None:
    old = job_of()
    for one in old["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0][
        "env"
    ]:
        if one["name"] == "TRAINYARD_CONFIG":
            one["value"] = "{broken"
    (change,) = diff_jobs(stored(old), job_of(), live=True)
    assert (change.path, change.before) == ("config", "{broken")


ENDED = {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED", "succeeded": 1}


@pytest.mark.parametrize("live", [True, False])
def test_submit_refuses_another_identity_field_by_field(live: bool) -> None:
    cluster = FakeCluster()
    old = stored(job_of(), None if live else ENDED)
    cluster.objects["RayJob", old["metadata"]["name"]] = old
    with pytest.raises(ConfigError, match="this run file would train another model") as raised:
        submit_rayjob(RayjobApi(cluster), job_of("train.seed=7", "train.model.name=resnet34"))
    shown = str(raised.value)
    assert "config.train.seed: 0 -> 7" in shown
    assert "config.train.model.name: resnet18 -> resnet34" in shown
    assert "--name" in shown
    assert "--fresh" in shown
    assert cluster.calls == []


@pytest.mark.parametrize("settings", [["faults.retries=9"], ["train.epochs=50"], ["image=other:2"]])
def test_submit_takes_what_is_no_identity(settings: list[str]) -> None:
    cluster = FakeCluster()
    old = stored(job_of(), ENDED)
    cluster.objects["RayJob", old["metadata"]["name"]] = old
    assert submit_rayjob(RayjobApi(cluster), job_of(*settings)) == "created"


NEVER_BEGAN = {"jobDeploymentStatus": "Failed", "jobStatus": ""}


@pytest.mark.parametrize(
    ("before", "is_refused"),
    [
        ([], False),
        ([("train.seed=0", NEVER_BEGAN)], False),
        ([("train.seed=0", ENDED)], True),
        ([("train.seed=0", ENDED), ("train.seed=7", ENDED)], False),
        ([("train.seed=7", ENDED), ("train.seed=0", ENDED)], False),
        ([("train.seed=0", ENDED), ("train.seed=7", NEVER_BEGAN)], True),
    ],
)
def test_what_began_binds_unless_one_of_it_agrees(
    before: list[tuple[str, Object]], is_refused: bool
) -> None:
    submissions = [stored(job_of(setting), status) for setting, status in before]
    if not is_refused:
        require_same_identity(submissions, job_of("train.seed=7"))
        return
    with pytest.raises(ConfigError, match=r"config\.train\.seed: 0 -> 7"):
        require_same_identity(submissions, job_of("train.seed=7"))


def platform_with(**changes: Any) -> Platform:
    document = yaml.safe_load((ROOT / "launcher/trainyard/platform.yaml").read_text())
    return parse_platform(yaml.safe_dump(document | changes), "test")


@pytest.mark.parametrize(
    ("changes", "path", "affects"),
    [
        ({"image": "other:2"}, "image", "later runs that name no image"),
        ({"kuberay": "1.7"}, "kuberay", "rules by which later runs are checked"),
        ({"queue": {"system": "kai", "name": "a"}}, "queue.system", "later runs"),
        ({"storage": {"path": "/elsewhere"}}, "storage.path", "start from the beginning"),
        ({"readerPod": {"metadata": {}, "spec": {"containers": [{}]}}}, "readerPod.spec", "folder"),
    ],
)
def test_a_difference_of_platforms_says_what_it_affects(
    changes: Object, path: str, affects: str
) -> None:
    found = diff_platforms(load_platform(None), platform_with(**changes))
    assert any(one.path.startswith(path) and affects in one.affects for one in found)
    assert {one.path.split(".")[0] for one in found} == set(changes)


def test_it_is_known_what_a_change_of_each_part_of_a_platform_affects() -> None:
    parts = {field.alias or name for name, field in Platform.model_fields.items()}
    assert AFFECTED.keys() == parts - {"rayClusterSpec"}


def shape_with(path: str, value: Any) -> Platform:
    shape = load_platform(None).model_copy(deep=True).ray_cluster_spec
    *parents, last = path.split(".")
    place: Any = shape
    for part in parents:
        place = place[int(part)] if part.isdecimal() else place[part]
    place[last] = value
    return platform_with(rayClusterSpec=shape)


@pytest.mark.parametrize(
    ("path", "value", "affects"),
    [
        (
            "headGroupSpec.template.spec.terminationGracePeriodSeconds",
            99,
            "standing cluster, which is recreated",
        ),
        ("workerGroupSpecs.0.template.spec.nodeSelector", {"a": "b"}, "later runs on pool cpu;"),
        ("workerGroupSpecs.1.template.spec.tolerations", [], "when another of its fields changes"),
    ],
)
def test_a_change_of_the_shape_affects_the_standing_cluster_too(
    path: str, value: Any, affects: str
) -> None:
    found = diff_platforms(load_platform(None), shape_with(path, value))
    assert found
    assert all(affects in one.affects for one in found)


def test_equal_platforms_differ_in_nothing() -> None:
    assert diff_platforms(load_platform(None), platform_with()) == ()


def test_the_platform_is_found_in_what_helm_prints() -> None:
    text = (ROOT / "launcher/trainyard/platform.yaml").read_text()
    manifests = [
        None,
        {"kind": "ServiceAccount", "metadata": {"name": "trainyard-run"}},
        {
            "kind": "ConfigMap",
            "metadata": {"name": "trainyard-platform"},
            "data": {"platform.yaml": text},
        },
    ]
    assert platform_of_manifests(manifests, "helm") == load_platform(None)
    with pytest.raises(ConfigError, match="holds no ConfigMap"):
        platform_of_manifests(manifests[:2], "helm")


def daemon_set(pool: str, **spec: Any) -> Object:
    container = {"name": "image", "image": "trainyard:1", "resources": {"limits": {"cpu": "100m"}}}
    return {
        "kind": "DaemonSet",
        "spec": {
            "selector": {"matchLabels": {"trainyard.io/prepull": pool}},
            "template": {
                "metadata": {"labels": {"trainyard.io/prepull": pool}},
                "spec": {"serviceAccountName": "run", "containers": [container]} | spec,
            },
        },
    }


def as_the_api_server_stores_it(daemons: Object) -> Object:
    daemons = json.loads(json.dumps(daemons))
    template = daemons["spec"]["template"]
    template["metadata"]["creationTimestamp"] = None
    template["spec"] |= {
        "dnsPolicy": "ClusterFirst",
        "restartPolicy": "Always",
        "schedulerName": "default-scheduler",
        "securityContext": {},
        "serviceAccount": "run",
    }
    template["spec"]["containers"][0] |= {
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
    }
    return daemons


def pre_pull_changes(before: list[Object], after: list[Object]) -> list[tuple[str, Any, Any, str]]:
    stored_before = pre_pull_pods(map(as_the_api_server_stores_it, before))
    found = diff_pre_pull(stored_before, pre_pull_pods([None, {"kind": "Service"}, *after]))
    return [(one.path, one.before, one.after, one.affects) for one in found]


def test_what_the_api_server_adds_to_pre_pull_pods_is_no_change() -> None:
    assert pre_pull_changes([daemon_set("gpu")], [daemon_set("gpu")]) == []


def test_a_change_of_pre_pull_pods_is_told_with_their_pool() -> None:
    after = [daemon_set("gpu", nodeSelector={"gpu": "h100"}), daemon_set("cpu")]
    assert pre_pull_changes([daemon_set("gpu"), daemon_set("old")], after) == [
        (
            "prePull.cpu",
            None,
            "present",
            "the pre-pull pods of pool cpu, which are created at once",
        ),
        (
            "prePull.gpu.spec.nodeSelector",
            None,
            {"gpu": "h100"},
            "the pre-pull pods of pool gpu, which are replaced at once",
        ),
        (
            "prePull.old",
            "present",
            None,
            "the pre-pull pods of pool old, which are deleted at once",
        ),
    ]


def test_changes_can_be_printed_as_json() -> None:
    changes = diff_jobs(stored(job_of()), job_of("train.seed=1", "network.preset=tcp"), live=True)
    assert json.dumps([one.before for one in changes] + [one.after for one in changes])


class Installed(FakeCluster):
    """A namespace with the platform and with pre-pull pods, which may be listed or not."""

    def __init__(self, *, lists: bool) -> None:
        super().__init__()
        self.lists = lists
        text = (ROOT / "launcher/trainyard/platform.yaml").read_text()
        self.objects["ConfigMap", "trainyard-platform"] = {
            "kind": "ConfigMap",
            "metadata": {"name": "trainyard-platform"},
            "data": {"platform.yaml": text},
        }
        self.objects["DaemonSet", "trainyard-prepull-gpu"] = daemon_set("gpu")

    def list(self, kind: str, *more: Any, **how: Any) -> list[Object]:
        if not self.lists:
            raise ClusterError("no", reason="Forbidden")
        return super().list(kind, *more, **how)


@pytest.mark.parametrize(
    ("lists", "documents", "told"),
    [
        (True, [daemon_set("gpu", nodeSelector={"gpu": "h100"})], ""),
        (False, [daemon_set("gpu")], "no permission to list DaemonSets in namespace team"),
        (True, None, "is a platform alone; use the output of `helm template`"),
    ],
)
def test_platform_diff_compares_pre_pull_pods_or_says_why_not(
    lists: bool,
    documents: list[Object] | None,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cluster = Installed(lists=lists)
    monkeypatch.setattr(platform_command, "open_cluster", lambda *_: cluster)
    config_map = cluster.objects["ConfigMap", "trainyard-platform"]
    file = tmp_path / "after.yaml"
    if documents is None:
        file.write_text(config_map["data"]["platform.yaml"])
    else:
        file.write_text(yaml.safe_dump_all([config_map, *documents]))
    with nullcontext() if told else pytest.raises(Exit):
        platform_command.platform_diff(file=file, namespace="team", context=None, as_json=True)
    said = capsys.readouterr()
    found = [one["path"] for one in json.loads(said.out)]
    assert found == ([] if told else ["prePull.gpu.spec.nodeSelector"])
    assert ("pre-pull pods are not compared" in said.err) == bool(told)
    assert told in said.err
