"""The whole path of a run with the commands of a user: chart, image, run file, RayJob, accuracy."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from conftest import (
    ROOT,
    Ended,
    Object,
    Team,
    cluster_py,
    get,
    kubectl,
    require_test_cluster,
    run,
    set_options,
    wait_for,
)

DIGITS = "examples/digits.yaml"
ENOUGH = 0.95
QUICK = "train.model.image_size=16"
LONG = (DIGITS, "--workers", "1", "--name", "long", "--set", QUICK, "--set", "train.epochs=100000")
"""The options of a long run. Its worker uses one of two cores, so that the other one is free for the test."""


@pytest.fixture(scope="module")
def deployed(team: Team) -> Ended:
    return team.make("deploy", "WORKERS=2")


def test_make_deploy_trains_the_digits_to_an_accuracy_worth_having(
    team: Team, deployed: Ended
) -> None:
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    (job,) = team.rayjobs()
    assert job["status"]["jobDeploymentStatus"] == "Complete"
    assert job["status"]["jobStatus"] == "SUCCEEDED"
    summary = team.status("digits")["summary"]
    assert summary["outcome"] == "succeeded"
    assert summary["val_accuracy"] >= ENOUGH
    assert summary["attempts"] == 1


def test_the_plan_stands_before_the_run_and_one_line_after_it(deployed: Ended) -> None:
    assert "batch per worker" in deployed.stdout
    assert "succeeded: validation accuracy" in deployed.stdout.splitlines()[-1]
    assert "samples/s" in deployed.stderr


def test_ray_pods_hold_no_token_and_nobody_joins_without_one(team: Team) -> None:
    (job,) = team.rayjobs()
    spec = job["spec"]["rayClusterSpec"]
    assert spec["authOptions"] == {"mode": "token"}
    pods = team.pods(is_ray_node="yes")
    assert pods
    for pod in pods:
        volumes = [volume["name"] for volume in pod["spec"]["volumes"]]
        assert not [name for name in volumes if name.startswith("kube-api-access")]


def test_logs_outlive_the_cluster(team: Team) -> None:
    live = team.make("logs")
    assert "succeeded: validation accuracy" in live.stdout
    kubectl("delete", "rayjobs.ray.io", "--all", "-n", team.namespace)
    wait_for("the pods go", lambda: not team.pods(is_ray_node="yes"))
    kept = team.trainyard("logs", "digits")
    assert kept.returncode == 0, kept.stderr
    assert "succeeded: validation accuracy" in kept.stdout
    assert team.status("digits")["summary"]["val_accuracy"] >= ENOUGH


def test_kubectl_apply_of_a_rendered_run_does_what_deploy_does(
    team: Team, make_team: Callable[[str], Team], tmp_path: Path
) -> None:
    second = make_team("second")
    second.install(tmp_path)
    settings = ("WORKERS=2", f"SET=train.epochs=2 {QUICK}")
    rendered = second.make("render", *settings)
    assert rendered.returncode == 0, rendered.stderr
    first = team.make("render", *settings)
    assert yaml.safe_load(rendered.stdout)["spec"] == yaml.safe_load(first.stdout)["spec"]

    kubectl("apply", "-f", "-", stdin=rendered.stdout)
    watched = second.trainyard("watch", "digits")
    assert watched.returncode == 0, watched.stderr
    (job,) = second.rayjobs()
    assert job["status"]["jobStatus"] == "SUCCEEDED"
    assert second.status("digits")["summary"]["epochs"] == 2
    # The launcher recognises the same submission. It has ended, so a new attempt has nothing to do.
    assert second.make("deploy", *settings).returncode == 0
    kubectl("delete", "rayjobs.ray.io", "--all", "-n", second.namespace)


@pytest.fixture
def long_run(team: Team) -> Object:
    """An active run that would train for hours."""
    submitted = team.trainyard("submit", *LONG, "--detach")
    assert submitted.returncode == 0, submitted.stderr
    return wait_for(
        "the long run makes progress",
        lambda: (
            progress if (progress := progress_of(team, "long")) and progress["step"] > 0 else None
        ),
    )


def progress_of(team: Team, name: str) -> Object | None:
    submissions = team.status(name)["submissions"]
    progress: Object | None = submissions[-1]["progress"] if submissions else None
    return progress


def memory_limit(pod_spec: Object) -> str:
    limit: str = pod_spec["containers"][0]["resources"]["limits"]["memory"]
    return limit


def test_helm_upgrade_reaches_the_standing_cluster_and_the_next_run_and_disturbs_none(
    team: Team, long_run: Object, tmp_path: Path
) -> None:
    team.install(tmp_path, rayCluster__enabled=True)
    wait_for("the standing cluster is ready", lambda: standing_pods(team, "2Gi"))
    under_way = {pod["metadata"]["uid"] for pod in run_pods(team, "long")}
    assert len(under_way) == 2

    team.install(tmp_path, rayCluster__enabled=True, pools__cpu__memoryGib=3)
    config_map = get("configmap", team.namespace, "trainyard-platform")
    pools = yaml.safe_load(config_map["data"]["platform.yaml"])["pools"]
    assert [pool["memoryGib"] for pool in pools if pool["name"] == "cpu"] == [3]
    wait_for("the standing cluster has the new memory", lambda: standing_pods(team, "3Gi"))

    deployed = team.make("deploy", "WORKERS=1", f"SET=name=next train.epochs=1 {QUICK}")
    assert deployed.returncode == 0, deployed.stderr
    worker = worker_pod(team, "next")
    assert memory_limit(worker["spec"]) == "3Gi"

    assert {pod["metadata"]["uid"] for pod in run_pods(team, "long")} == under_way
    before = long_run["step"]
    wait_for(
        "the long run went on", lambda: (progress_of(team, "long") or {"step": 0})["step"] > before
    )
    team.install(tmp_path)  # the standing cluster goes


def standing_pods(team: Team, memory: str) -> bool:
    """Return whether the standing cluster's only worker pod has this memory."""
    pods = team.pods(cluster="trainyard", node_type="worker")
    return [(pod["status"]["phase"], memory_limit(pod["spec"])) for pod in pods] == [
        ("Running", memory)
    ]


def run_pods(team: Team, name: str) -> list[Object]:
    found: list[Object] = get(
        "pods", team.namespace, "-l", f"trainyard.io/run={name},ray.io/is-ray-node=yes"
    )["items"]
    return found


def worker_pod(team: Team, name: str) -> Object:
    """Return the worker's pod of a run with one worker."""
    (worker,) = [
        pod
        for pod in run_pods(team, name)
        if pod["metadata"]["labels"]["ray.io/node-type"] == "worker"
    ]
    return worker


def test_a_live_run_is_found_by_the_same_file_and_refused_for_another(team: Team) -> None:
    same = team.trainyard("submit", *LONG, "--detach")
    assert same.returncode == 0
    assert "is running already" in same.stderr
    changed = team.trainyard("submit", *LONG, "--set", "faults.retries=7", "--detach")
    assert changed.returncode == 3
    assert "trainyard stop long" in changed.stderr
    other = team.trainyard("submit", *LONG, "--set", "train.seed=1", "--detach")
    assert other.returncode == 2
    assert "train.seed" in other.stderr
    assert "--name" in other.stderr


def test_ctrl_c_detaches_and_says_how_to_come_back(team: Team) -> None:
    watch = subprocess.Popen(
        [ROOT / ".venv/bin/trainyard", "watch", "long", "-n", team.namespace],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watch.stderr is not None
    assert any("step" in line for line in watch.stderr)
    watch.send_signal(signal.SIGINT)
    rest = watch.stderr.read()
    assert watch.wait() == 130
    assert f"trainyard watch long -n {team.namespace}" in rest


def test_a_worker_of_a_real_run_is_found_by_its_rank(team: Team) -> None:
    command = (ROOT / ".venv/bin/trainyard", "shell", "long", "0", "-n", team.namespace)
    inside = run(*command, "--", "sh", "-c", "echo $RAY_CLOUD_INSTANCE_ID")
    assert inside.returncode == 0, inside.stderr
    assert inside.stdout.strip() == worker_pod(team, "long")["metadata"]["name"]
    assert "RayTrainWorker" in team.trainyard("logs", "long", "--worker", "0").stdout


def test_a_worker_of_a_real_run_is_debugged_and_trains_on(team: Team) -> None:
    command = (ROOT / ".venv/bin/trainyard", "debug", "long", "0", "-n", team.namespace)
    ended = run(*command, stdin="p type(batch).__name__\nq\n")
    assert ended.returncode == 0, ended.stderr
    assert "(Pdb) 'Batch'" in ended.stdout
    assert ended.stdout.endswith("The worker trains on.\n")
    before = progress_of(team, "long")
    assert before is not None
    wait_for(
        "the run makes steps again",
        lambda: (progress_of(team, "long") or before)["step"] > before["step"],
    )


def test_stop_leaves_the_folder_and_the_next_deploy_resumes(team: Team, tmp_path: Path) -> None:
    stopped = team.trainyard("stop", "long")
    assert stopped.returncode == 0, stopped.stderr
    saved = re.search(
        r"its driver ended by itself, its checkpoint is of step (\d+)", stopped.stderr
    )
    assert saved is not None
    team.trainyard("cp", "long:checkpoints", str(tmp_path))
    manifests = [json.loads(file.read_text()) for file in tmp_path.rglob("manifest.json")]
    assert int(saved[1]) in [manifest["trained"]["step"] for manifest in manifests]
    settings = ("name=paused", "train.epochs=5", QUICK)
    options = set_options(settings)
    assert team.trainyard("submit", DIGITS, *options, "--detach").returncode == 0
    wait_for(
        "a checkpoint is there",
        lambda: (progress_of(team, "paused") or {"epoch": 0})["epoch"] > 1,
    )
    assert team.trainyard("stop", "paused").returncode == 0
    assert get("rayjobs.ray.io", team.namespace, "-l", "trainyard.io/run=paused")["items"] == []
    resumed = team.make("deploy", "WORKERS=2", f"SET={' '.join(settings)}")
    assert resumed.returncode == 0, resumed.stderr
    summary = team.status("paused")["summary"]
    assert summary["resumed_from"] is not None
    assert (summary["attempts"], summary["epochs"]) == (2, 5)


@pytest.mark.full
def test_a_run_that_begins_anew_sets_aside_what_it_had(team: Team, tmp_path: Path) -> None:
    settings = ("name=paused", "train.epochs=1", QUICK)
    options = set_options(settings)
    ended = team.trainyard("submit", DIGITS, *options, "--fresh")
    assert ended.returncode == 0, ended.stderr
    assert "the folder of run paused is now paused-old-1" in ended.stderr
    summary = team.status("paused")["summary"]
    assert (summary["epochs"], summary["resumed_from"]) == (1, None)
    team.trainyard("cp", "paused-old-1:summary.json", str(tmp_path / "old.json"))
    assert json.loads((tmp_path / "old.json").read_text())["epochs"] == 5


def test_gpus_are_requested_scheduled_and_counted_and_a_missing_cuda_is_said(
    team: Team, fake_gpus: str
) -> None:
    deployed = team.make("deploy", "GPUS=2", "SET=name=gpus faults.retries=0")
    assert deployed.returncode != 0
    assert "CUDA" in deployed.stderr
    worker = worker_pod(team, "gpus")
    assert worker["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert worker["spec"]["nodeName"] == fake_gpus
    log = team.trainyard("logs", "gpus").stdout
    assert "2 GPUs" in log or "GPU: 2" in log or "'GPU': 2.0" in log
    summary = team.status("gpus")["summary"]
    assert summary["outcome"] == "failed"
    assert "CUDA" in summary["error"]


@pytest.fixture
def fake_gpus() -> Iterator[str]:
    """The test cluster's node with two fake GPUs, on which torch finds no CUDA."""
    require_test_cluster("only its node may be made to claim GPUs that it does not have")
    cluster_py("gpus", "2")
    yield get("nodes", "default")["items"][0]["metadata"]["name"]
    cluster_py("gpus", "0")


def test_an_object_of_that_name_that_is_not_ours_is_left_alone(team: Team) -> None:
    rendered = yaml.safe_load(team.make("render", "WORKERS=2", "SET=name=taken").stdout)
    rendered["metadata"]["labels"] = {"owner": "someone"}
    rendered["spec"]["suspend"] = True
    kubectl("create", "-f", "-", stdin=json.dumps(rendered))
    refused = team.trainyard("submit", DIGITS, "--name", "taken")
    assert refused.returncode == 3
    assert "is not ours" in refused.stderr
    name = rendered["metadata"]["name"]
    assert get("rayjobs.ray.io", team.namespace, name)["metadata"]["labels"] == {"owner": "someone"}
    kubectl("delete", "rayjobs.ray.io", name, "-n", team.namespace)


def kubeconfig_of(team: Team, account: str, path: Path) -> str:
    """Write the kubeconfig of a service account for the API server in use."""
    kubectl("create", "serviceaccount", account, "-n", team.namespace)
    token = kubectl("create", "token", account, "-n", team.namespace).strip()
    view = json.loads(kubectl("config", "view", "--raw", "--minify", "-o", "json"))
    view["users"][0]["user"] = {"token": token}
    path.write_text(json.dumps(view))
    return str(path)


def test_who_may_not_create_rayjobs_is_told_so_and_the_role_of_the_chart_is_enough(
    team: Team, tmp_path: Path
) -> None:
    nobody = kubeconfig_of(team, "nobody", tmp_path / "nobody")
    refused = team.trainyard("submit", DIGITS, KUBECONFIG=nobody)
    assert refused.returncode == 3
    assert "Forbidden" in refused.stderr
    assert "launcher.rbac.subjects" in refused.stderr

    engineer = kubeconfig_of(team, "engineer", tmp_path / "engineer")
    subject = {"kind": "ServiceAccount", "name": "engineer", "namespace": team.namespace}
    team.install(tmp_path, launcher__rbac__subjects=[subject])
    allowed = team.trainyard(
        "submit",
        DIGITS,
        "--name",
        "allowed",
        "--set",
        QUICK,
        "--set",
        "train.epochs=1",
        KUBECONFIG=engineer,
    )
    assert allowed.returncode == 0, allowed.stderr
    assert team.trainyard("status", "allowed", KUBECONFIG=engineer).returncode == 0
    assert team.trainyard("logs", "allowed", KUBECONFIG=engineer).returncode == 0


def test_a_cluster_without_the_crds_is_told_to_install_the_operator(team: Team) -> None:
    """Check the messages for the API server's answers to an unknown group and an unknown resource."""
    from trainyard.cluster.cluster import Cluster
    from trainyard.cluster.kinds import KINDS, Kind
    from trainyard.errors import ClusterError

    there = Cluster(team.namespace)
    for group in ("ray.nowhere/v1", "apps/v1"):
        KINDS["Missing"] = Kind(group, "rayjobs")
        with pytest.raises(ClusterError, match="NoSuchKind") as raised:
            there.list("Missing", {})
        assert "make operator" in str(raised.value)
    del KINDS["Missing"]


def test_the_admin_leaves_nothing_running(team: Team) -> None:
    kubectl("delete", "rayjobs.ray.io", "--all", "-n", team.namespace)
    wait_for("all pods are gone", lambda: not get("pods", team.namespace)["items"])
    assert run("helm", "uninstall", "trainyard", "-n", team.namespace).returncode == 0
    claims = get("pvc", team.namespace)["items"]
    assert [claim["metadata"]["name"] for claim in claims] == ["trainyard-storage"]
