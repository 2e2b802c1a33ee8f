"""The commands that inspect or control a run, on a real API server.

Most RayJobs in these tests belong to a controller that does not exist. The operator therefore ignores them,
and the test sets their status. Pods are real if something must run in them.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import (
    ROOT,
    Object,
    Team,
    cluster_py,
    get,
    kubectl,
    require_test_cluster,
    run,
    wait_for,
)

DIGITS = "examples/digits.yaml"
MANAGED = {"managedBy": "kueue.x-k8s.io/multikueue"}
PROGRESS = {
    "attempt": 1, "epoch": 3, "epochs": 12, "step": 30, "steps": 120, "percent": 25.0, "loss": 0.5,
    "accuracy": 0.9, "val_accuracy": None, "samples_per_s": 100.0, "eta_s": 60.0,
}  # fmt: skip
SUMMARY = {
    "outcome": "succeeded", "error": None, "val_accuracy": 0.97, "epochs": 12, "train_s": 60.0,
    "samples_per_s": 100.0, "resumed_from": None, "model": "m", "metrics": "x", "report": "r",
}  # fmt: skip
SAY = "import json, sys, time\nfor line in json.loads(sys.argv[1]): print(line, flush=True)\n"


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("commands")
    team.install(tmp_path_factory.mktemp("values"))
    return team


class Submitted:
    """A submitted run whose status is set by the test."""

    def __init__(self, team: Team, name: str) -> None:
        self.team, self.run = team, name
        rendered = yaml.safe_load(
            team.trainyard("render", DIGITS, "--name", name, "--from-cluster").stdout
        )
        rendered["spec"] |= MANAGED
        self.job: str = rendered["metadata"]["name"]
        self.ray_cluster = f"{self.job}-abcde"
        kubectl("create", "-f", "-", stdin=json.dumps(rendered))

    def stands(self, deployment: str, job: str = "", **more: Any) -> None:
        status = {"jobDeploymentStatus": deployment, "jobStatus": job, "jobId": f"{self.job}-x"}
        status |= {"rayClusterName": self.ray_cluster, "startTime": "2026-01-01T00:00:00Z", **more}
        patch = json.dumps({"status": status})
        place = ("-n", self.team.namespace, "--subresource=status", "--type=merge")
        kubectl("patch", "rayjobs.ray.io", self.job, *place, "-p", patch)

    def pod(self, kind: str, *command: str) -> str:
        """Create a pod with KubeRay's labels and the storage, which runs a given command."""
        config_map = get("configmap", self.team.namespace, "trainyard-platform")
        pod = yaml.safe_load(config_map["data"]["platform.yaml"])["readerPod"]
        name = f"{self.ray_cluster}-{kind}"
        labels = {"ray.io/cluster": self.ray_cluster, "ray.io/node-type": kind}
        labels |= {"trainyard.io/run": self.run, "app.kubernetes.io/managed-by": "trainyard"}
        pod["metadata"] = {"name": name, "labels": labels}
        pod["spec"] |= {"activeDeadlineSeconds": 1800, "terminationGracePeriodSeconds": 0}
        container = pod["spec"]["containers"][0]
        container |= {"name": f"ray-{kind}", "image": self.team.image, "command": list(command)}
        kubectl("create", "-n", self.team.namespace, "-f", "-", stdin=json.dumps(pod))
        ready = ("wait", "-n", self.team.namespace, f"pod/{name}", "--timeout=180s")
        kubectl(*ready, "--for=jsonpath={.status.phase}=Running")
        return name

    def head(self, *lines: str, then: str = "time.sleep(3600)") -> str:
        """Create a head pod that prints the given lines and keeps running."""
        return self.pod("head", "python", "-c", SAY + then, json.dumps(lines))

    def write(self, pod: str, file: str, text: str) -> None:
        """Write a file to the run's folder."""
        script = (
            "import pathlib, sys; path = pathlib.Path(sys.argv[1]); "
            "path.parent.mkdir(parents=True, exist_ok=True); path.write_text(sys.argv[2])"
        )
        inside = ("exec", "-n", self.team.namespace, pod, "--", "python", "-c", script)
        kubectl(*inside, f"/mnt/trainyard/{self.run}/{file}", text)

    def remove(self) -> None:
        selector = ("-l", f"trainyard.io/run={self.run}", "-n", self.team.namespace)
        kubectl("delete", "pods", *selector, "--wait=true")
        kubectl("delete", "rayjobs.ray.io", *selector, "--wait=true")


@pytest.fixture
def submitted(team: Team, request: pytest.FixtureRequest) -> Iterator[Submitted]:
    """A run that is used by one test only."""
    made = Submitted(team, f"t{hashlib.sha256(request.node.name.encode()).hexdigest()[:10]}")
    yield made
    made.remove()


def test_a_dry_run_prints_what_would_be_sent_or_stored_and_creates_nothing(team: Team) -> None:
    options = ("submit", DIGITS, "--name", "dry")
    client = team.trainyard(*options, "--dry-run")
    assert client.returncode == 0, client.stderr
    assert client.stdout == team.trainyard("render", *options[1:], "--from-cluster").stdout
    server = team.trainyard(*options, "--dry-run=server")
    assert server.returncode == 0, server.stderr
    stored = yaml.safe_load(server.stdout)
    assert stored["metadata"]["uid"]
    assert stored["spec"]["entrypoint"] == yaml.safe_load(client.stdout)["spec"]["entrypoint"]
    assert get("rayjobs.ray.io", team.namespace, "-l", "trainyard.io/run=dry")["items"] == []


def test_a_misspelled_field_of_the_platform_is_refused_before_the_api_server_is_asked(
    team: Team, tmp_path: Path
) -> None:
    platform = yaml.safe_load(team.trainyard("platform", "get").stdout)
    platform["rayClusterSpec"]["headGroupSpec"]["rayStartParam"] = {}
    file = tmp_path / "platform.yaml"
    file.write_text(yaml.safe_dump(platform))
    refused = team.trainyard("submit", DIGITS, "--platform", str(file), "--dry-run=server")
    assert refused.returncode == 2
    assert "headGroupSpec.rayStartParam = {}: is not a field" in refused.stderr


def test_a_server_side_dry_run_says_what_the_api_server_refuses(team: Team, tmp_path: Path) -> None:
    file = tmp_path / "platform.yaml"
    file.write_text(team.trainyard("platform", "get").stdout)
    nowhere = Team("no-such-namespace", team.image)
    refused = nowhere.trainyard("submit", DIGITS, "--platform", str(file), "--dry-run=server")
    assert refused.returncode == 3
    assert 'namespaces "no-such-namespace" not found' in refused.stderr


@pytest.fixture
def too_large() -> tuple[str, ...]:
    """A run whose pods do not fit on any node."""
    return ("submit", DIGITS, "--gpus", "2", "--detach", "--name", "large")


def test_two_who_submit_the_same_at_once_get_one_submission(
    team: Team, too_large: tuple[str, ...]
) -> None:
    ended = team.at_once(too_large, too_large)
    assert [each.returncode for each in ended] == [0, 0], [each.stderr for each in ended]
    assert len(live(team, "large")) == 1
    assert "trainyard watch large" in ended[0].stderr


def live(team: Team, name: str) -> list[Object]:
    found: list[Object] = get("rayjobs.ray.io", team.namespace, "-l", f"trainyard.io/run={name}")[
        "items"
    ]
    return found


def test_suspend_gives_the_nodes_back_and_resume_goes_on(
    team: Team, too_large: tuple[str, ...]
) -> None:
    def deployment() -> str:
        (job,) = live(team, "large")
        return str(job.get("status", {}).get("jobDeploymentStatus", ""))

    assert team.trainyard(*too_large).returncode == 0
    wait_for("it starts", lambda: deployment() == "Initializing")
    suspended = team.trainyard("suspend", "large")
    assert suspended.returncode == 0, suspended.stderr
    assert "trainyard resume large" in suspended.stderr
    wait_for("it is suspended", lambda: deployment() == "Suspended")
    assert "suspended" in team.trainyard("list").stdout
    wait_for("its head is gone", lambda: team.trainyard("logs", "large").returncode == 2)
    assert "run large has no log yet" in team.trainyard("logs", "large").stderr
    assert team.trainyard("resume", "large").returncode == 0
    wait_for("it starts again", lambda: deployment() == "Initializing")
    assert "nothing to resume" in team.trainyard("resume", "large").stderr


def test_a_start_that_waits_says_for_what(team: Team, too_large: tuple[str, ...]) -> None:
    assert team.trainyard(*too_large).returncode == 0
    (stored,) = live(team, "large")
    again = team.trainyard(*too_large, "--dry-run=server")
    assert again.returncode == 0, again.stderr
    assert "it is running already" in again.stderr
    assert yaml.safe_load(again.stdout)["metadata"]["name"] == stored["metadata"]["name"]
    wait_for(
        "the scheduler has spoken",
        lambda: "nvidia.com/gpu" in team.trainyard("status", "large").stdout,
    )
    assert "nvidia.com/gpu" in team.trainyard("status").stdout
    stopped = team.trainyard("stop", "large")
    assert stopped.returncode == 0, stopped.stderr
    assert "no driver was running" in stopped.stderr
    assert live(team, "large") == []


def test_of_two_different_runs_of_one_name_at_once_one_is_refused(team: Team) -> None:
    commands = [
        (
            "submit",
            DIGITS,
            "--gpus",
            "2",
            "--detach",
            "--name",
            "race",
            "--set",
            f"train.seed={seed}",
        )
        for seed in (1, 2)
    ]
    ended = team.at_once(*commands)
    assert sorted(each.returncode for each in ended) == [0, 3], [each.stderr for each in ended]
    wait_for("one is left", lambda: len(live(team, "race")) == 1)
    assert team.trainyard("stop", "race", "--now").returncode == 0


KILLED = """
import os, signal, sys
from trainyard import __main__ as program
from trainyard.cluster.connection import Connection

left, moment = int(sys.argv[1]), sys.argv[2]
ask = Connection._request

def ask_and_die(self, *arguments, **options):
    global left
    left -= 1
    if left == 0 and moment == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        return ask(self, *arguments, **options)
    finally:
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

Connection._request = ask_and_die
sys.exit(program.run(sys.argv[3:]))
"""
"""A launcher that is killed before or after its n-th request to the API server."""


def test_a_launcher_killed_at_any_point_of_submit_leaves_what_the_next_one_makes_whole(
    team: Team, too_large: tuple[str, ...]
) -> None:
    python, command = ROOT / ".venv/bin/python", (*too_large, "-n", team.namespace)
    points = ((point, moment) for point in itertools.count(1) for moment in ("before", "after"))
    for point, moment in points:
        ended = run(python, "-c", KILLED, str(point), moment, *command)
        if ended.returncode == 0:
            break  # it asks less often
        assert ended.returncode == -signal.SIGKILL
        assert len(live(team, "large")) <= 1
        assert team.trainyard(*too_large).returncode == 0
        assert len(live(team, "large")) == 1
        assert team.trainyard("stop", "large", "--now").returncode == 0
    assert point > 4  # the platform, the run's RayJobs twice, the creation
    assert team.trainyard("stop", "large", "--now").returncode == 0


class Watching:
    """A running `trainyard watch`, whose output is stored line by line."""

    def __init__(self, submitted: Submitted) -> None:
        command = [str(ROOT / ".venv/bin/trainyard"), "watch", submitted.run]
        self.process = subprocess.Popen(
            [*command, "-n", submitted.team.namespace],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def says(self, what: str) -> None:
        wait_for(f"watch says {what!r}", lambda: any(what in line for line in self.lines), 90)

    def end(self) -> tuple[int, str]:
        code = self.process.wait(60)
        self.thread.join(10)
        return code, "\n".join(self.lines)


def test_watch_shows_phases_and_progress_and_ends_with_the_driver_s_last_words(
    submitted: Submitted,
) -> None:
    submitted.stands("Initializing")
    watching = Watching(submitted)
    watching.says("starting ...")
    submitted.head(f"progress {json.dumps(PROGRESS)}", f"summary {json.dumps(SUMMARY)}")
    submitted.stands("Running", "RUNNING")
    watching.says("running ...")
    watching.says("starting for 0:")
    watching.says("epoch 3/12  step 30/120  loss 0.5000  accuracy 0.900")
    submitted.stands("Complete", "SUCCEEDED")
    code, said = watching.end()
    assert code == 0, said
    assert "running for 0:" in said
    assert watching.process.stdout is not None
    assert watching.process.stdout.read().startswith("succeeded: validation accuracy 0.9700")


def test_watch_outlives_a_restart_of_the_api_server_and_misses_nothing(
    submitted: Submitted,
) -> None:
    require_test_cluster("only its API server may be restarted")
    submitted.stands("Running", "RUNNING")
    submitted.head(f"progress {json.dumps(PROGRESS)}", then=(
        "\nfor step in range(31, 4000):\n"
        "    record = json.loads(sys.argv[1])[0].removeprefix('progress ')\n"
        "    print('progress', json.dumps(json.loads(record) | {'step': step}), flush=True)\n"
        "    time.sleep(1)\n"
    ))  # fmt: skip
    watching = Watching(submitted)
    watching.says("step 3")
    cluster_py("restart", "kube-apiserver")
    before = len(watching.lines)
    wait_for(
        "the driver's progress comes again",
        lambda: any("step" in line for line in watching.lines[before:]),
        90,
    )
    submitted.stands("Running", "RUNNING", failed=1)
    submitted.stands("Failed", "FAILED", reason="AppFailed", message="error: of the driver")
    code, said = watching.end()
    assert code == 1, said
    assert watching.process.poll() == 1


def test_watch_says_that_its_run_was_deleted(submitted: Submitted) -> None:
    submitted.stands("Initializing")
    watching = Watching(submitted)
    watching.says("starting ...")
    kubectl("delete", "rayjobs.ray.io", submitted.job, "-n", submitted.team.namespace)
    code, said = watching.end()
    assert code == 1
    assert f"RayJob {submitted.job} was deleted while it was watched" in said


def test_ctrl_c_detaches(submitted: Submitted) -> None:
    submitted.stands("Initializing")
    watching = Watching(submitted)
    watching.says("starting ...")
    watching.process.send_signal(signal.SIGINT)
    code, said = watching.end()
    assert code == 130
    assert f"trainyard watch {submitted.run} -n {submitted.team.namespace}" in said


def test_a_run_is_shown_as_table_wide_json_and_yaml(submitted: Submitted) -> None:
    ask = submitted.team.trainyard
    submitted.stands("Running", "RUNNING", failed=1, rayClusterStatus={
        "desiredWorkerReplicas": 2, "readyWorkerReplicas": 1, "desiredCPU": "4",
        "desiredMemory": "8Gi", "desiredGPU": "0", "desiredTPU": "0",
    })  # fmt: skip
    (row,) = [
        row
        for row in json.loads(ask("list", "-o", "json").stdout)["runs"]
        if row["run"] == submitted.run
    ]
    assert (row["phase"], row["attempts"], row["nodes"]) == ("running", 2, "1/2")
    assert row["duration"] > 0
    assert submitted.run in ask("list").stdout
    assert submitted.ray_cluster in ask("list", "-o", "wide").stdout
    everywhere = yaml.safe_load(ask("list", "-A", "-o", "yaml").stdout)["runs"]
    assert (submitted.team.namespace, submitted.run) in {
        (row["namespace"], row["run"]) for row in everywhere
    }
    status = yaml.safe_load(ask("status", submitted.run, "-o", "yaml").stdout)
    assert status == json.loads(ask("status", submitted.run, "--json").stdout) | {
        "submissions": status["submissions"]
    }
    assert status["submissions"][0]["submission"] == submitted.job
    assert f"{submitted.job}-x" in ask("status", "-o", "wide").stdout


def test_a_run_that_is_not_there_is_said_so_by_every_command(team: Team) -> None:
    for command in (["watch", "none"], ["resume", "none"], ["suspend", "none"], ["dashboard", "none"],
                    ["shell", "none", "0"], ["delete", "none", "--yes"]):  # fmt: skip
        ended = team.trainyard(*command)
        assert ended.returncode == 2, (command, ended.stderr)
        assert "none" in ended.stderr
    assert team.trainyard("stop", "none").returncode == 0


def test_the_driver_s_log_is_printed_followed_and_cut(submitted: Submitted) -> None:
    ask = submitted.team.trainyard
    submitted.stands("Running", "RUNNING")
    submitted.head("the first", f"progress {json.dumps(PROGRESS)}",
                   then="time.sleep(20); print('the last', flush=True)")  # fmt: skip
    printed = ask("logs", submitted.run).stdout
    assert printed.startswith("the first\n")
    assert " 25%  epoch 3/12" in printed
    followed = ask("logs", submitted.run, "-f")
    assert followed.returncode == 0, followed.stderr
    assert followed.stdout.splitlines()[0] == "the first"
    assert followed.stdout.splitlines()[-1] == "the last"
    assert len(followed.stdout.splitlines()) == 3


def test_since_and_tail_leave_out_what_is_older(submitted: Submitted) -> None:
    submitted.stands("Running", "RUNNING")
    submitted.head("the old", then="time.sleep(8); print('the new', flush=True); time.sleep(900)")
    ask = submitted.team.trainyard
    wait_for("the new line is there", lambda: "the new" in ask("logs", submitted.run).stdout)
    assert ask("logs", submitted.run, "--since", "5s").stdout.splitlines() in (["the new"], [])
    assert "the old" in ask("logs", submitted.run, "--since", "1h").stdout
    assert ask("logs", submitted.run, "--tail", "1").stdout == "the new\n"


def test_logs_of_attempts_are_kept_in_the_folder(submitted: Submitted) -> None:
    ask = submitted.team.trainyard
    submitted.stands("Running", "RUNNING")
    head = submitted.head("of the head")
    submitted.write(head, "logs/attempt-1.log", "of the first\n")
    submitted.write(head, "logs/attempt-2.log", "of the second\n")
    submitted.write(head, "logs/attempt-1.2/worker-3.log", "of the killed worker\n")
    submitted.write(head, "logs/attempt-2.1/worker-3.log", "of the worker\n")
    assert ask("logs", submitted.run).stdout == "of the head\n"
    assert ask("logs", submitted.run, "--previous").stdout == "of the first\n"
    assert ask("logs", submitted.run, "--attempt", "2").stdout == "of the second\n"
    worker = ("logs", submitted.run, "--worker", "3")
    assert ask(*worker, "--previous").stdout == "of the killed worker\n"
    assert ask(*worker, "--attempt", "2").stdout == "of the worker\n"
    missing = ask("logs", submitted.run, "--attempt", "7")
    assert missing.returncode == 2
    assert "It has those of: 1, 2." in missing.stderr
    kubectl("delete", "pod", head, "-n", submitted.team.namespace)
    submitted.stands("Failed", "FAILED")
    # It is read through a reader pod, which is deleted afterwards.
    assert ask("logs", submitted.run).stdout == "of the second\n"
    assert ask(*worker).stdout == "of the worker\n"
    selector = f"trainyard.io/run={submitted.run}"
    assert get("pods", submitted.team.namespace, "-l", selector)["items"] == []


@pytest.fixture
def with_worker(submitted: Submitted) -> Submitted:
    """A run with a head and a worker whose rank is in the run's folder."""
    submitted.stands("Running", "RUNNING")
    head = submitted.head()
    worker = submitted.pod("worker", "sh", "-c", (
        "mkdir -p /tmp/ray/session_latest/logs && cd /tmp/ray/session_latest/logs && "
        "printf 'the first\\nto stdout\\n' > worker-w0-01-7.out && "
        "echo to stderr > worker-w0-01-7.err && sleep 3600"
    ))  # fmt: skip
    places = [{"rank": 0, "node": worker, "process": 7, "ray_worker": "w0"},
              {"rank": 1, "node": "gone", "process": 7, "ray_worker": "w1"}]  # fmt: skip
    submitted.write(head, "workers.json", json.dumps({"attempt": 1, "workers": places}))
    return submitted


def test_a_worker_is_entered_by_its_rank(with_worker: Submitted) -> None:
    team, name = with_worker.team, with_worker.run
    inside = run(
        ROOT / ".venv/bin/trainyard", "shell", name, "0", "-n", team.namespace,
        "--", "sh", "-c", "hostname; echo oops >&2; exit 7",
    )  # fmt: skip
    assert inside.returncode == 7
    assert inside.stdout.strip() in f"{with_worker.ray_cluster}-worker"
    assert inside.stderr.endswith("oops\n")
    typed = run(
        ROOT / ".venv/bin/trainyard", "shell", name, "0", "-n", team.namespace,
        stdin="echo from $((6 * 7))\nexit 3\n",
    )  # fmt: skip
    assert (typed.returncode, typed.stdout) == (3, "from 42\n")
    gone = team.trainyard("shell", name, "1")
    assert gone.returncode == 2
    assert "which is gone" in gone.stderr
    beyond = team.trainyard("shell", name, "2")
    assert "Its workers have the ranks 0 to 1" in beyond.stderr


def test_a_worker_s_own_log_is_printed(with_worker: Submitted) -> None:
    command = ("logs", with_worker.run, "--worker", "0")
    log = with_worker.team.trainyard(*command)
    assert log.returncode == 0, log.stderr
    assert set(log.stdout.split("\n")) == {"the first", "to stdout", "to stderr", ""}
    last = with_worker.team.trainyard(*command, "--tail", "1")
    assert set(last.stdout.split("\n")) == {"to stdout", "to stderr", ""}


def test_a_run_whose_queue_is_of_a_kueue_that_is_not_installed_is_told_so(
    submitted: Submitted,
) -> None:
    queued = {
        "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team"}},
        "spec": {"suspend": True},
    }
    place = ("-n", submitted.team.namespace, "--type=merge")
    kubectl("patch", "rayjobs.ray.io", submitted.job, *place, "-p", json.dumps(queued))
    submitted.stands("Suspended")
    explained = submitted.team.trainyard("explain", submitted.run)
    assert "waits in Kueue queue team, and Kueue is not installed" in explained.stdout


def test_the_dashboard_is_reached_with_its_token(submitted: Submitted) -> None:
    submitted.stands("Running", "RUNNING")
    submitted.head(then=(
        "import http.server as h; h.ThreadingHTTPServer(('', 8265), h.SimpleHTTPRequestHandler)"
        ".serve_forever()"
    ))  # fmt: skip
    token = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": submitted.ray_cluster}}
    data = {"auth_token": base64.b64encode(b"very secret").decode()}
    kubectl(
        "create",
        "-n",
        submitted.team.namespace,
        "-f",
        "-",
        stdin=json.dumps(token | {"data": data}),
    )
    command = [ROOT / ".venv/bin/trainyard", "dashboard", submitted.run, "--port", "0"]
    process = subprocess.Popen(
        [*command, "-n", submitted.team.namespace], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert process.stdout.readline() == "token: very secret\n"
        time.sleep(1)  # the server in the pod may still be starting
        for _ in range(3):
            with urllib.request.urlopen(address, timeout=30) as answer:
                assert b"Directory listing" in answer.read()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


def test_files_are_copied_byte_for_byte_with_and_without_the_cluster(
    submitted: Submitted, tmp_path: Path
) -> None:
    ask, place = submitted.team.trainyard, f"/mnt/trainyard/{submitted.run}"
    submitted.stands("Running", "RUNNING")
    head = submitted.head()
    write = (
        f"import os, pathlib; p = pathlib.Path('{place}/checkpoints/s1'); p.mkdir(parents=True); "
        "(p / 'model.pt').write_bytes(os.urandom(20_000_001)); (p / 'empty').touch()"
    )
    inside = ("exec", "-n", submitted.team.namespace, head, "--")
    kubectl(*inside, "python", "-c", write)
    wanted = kubectl(*inside, "sha256sum", f"{place}/checkpoints/s1/model.pt").split()[0]

    def copied(path: str, target: Path) -> Path:
        ended = ask("cp", f"{submitted.run}:{path}", str(target))
        assert ended.returncode == 0, ended.stderr
        return target

    file = copied("checkpoints/s1/model.pt", tmp_path / "mine.pt")
    assert hashlib.sha256(file.read_bytes()).hexdigest() == wanted
    kubectl("delete", "pod", head, "-n", submitted.team.namespace)
    submitted.stands("Complete", "SUCCEEDED")
    folder = copied("checkpoints", tmp_path / "all")
    assert hashlib.sha256((folder / "s1/model.pt").read_bytes()).hexdigest() == wanted
    assert (folder / "s1/empty").read_bytes() == b""
    listed = ask("cp", f"{submitted.run}:").stdout.splitlines()
    assert listed == ["checkpoints/s1/empty", "checkpoints/s1/model.pt"]
    missing = ask("cp", f"{submitted.run}:nothing", str(tmp_path / "x"))
    assert missing.returncode == 2
    assert f"run {submitted.run} has no nothing" in missing.stderr


def test_only_what_is_not_live_is_deleted_and_its_folder_only_on_request(
    submitted: Submitted,
) -> None:
    team, name = submitted.team, submitted.run
    submitted.stands("Running", "RUNNING")
    head = submitted.head()
    submitted.write(head, "run.json", "{}")
    refused = team.trainyard("delete", name, "--folder", "--yes")
    assert refused.returncode == 3
    assert f"trainyard stop {name}" in refused.stderr
    kubectl("delete", "pod", head, "-n", team.namespace)
    submitted.stands("Complete", "STOPPED")
    command = (ROOT / ".venv/bin/trainyard", "delete", name, "-n", team.namespace)
    declined = run(*command, stdin="n\n")
    assert declined.returncode == 1
    assert len(live(team, name)) == 1
    assert run(*command, stdin="y\n").returncode == 0
    assert live(team, name) == []
    assert team.trainyard("cp", f"{name}:").stdout == "run.json\n"
    assert team.trainyard("delete", name, "--folder", "--yes").returncode == 0
    assert team.trainyard("cp", f"{name}:").returncode == 2
    assert team.trainyard("delete", name, "--folder", "--yes").returncode == 2


def test_a_stop_that_cannot_reach_the_driver_leaves_the_run_and_now_does_not_ask(
    submitted: Submitted,
) -> None:
    submitted.stands("Running", "RUNNING")
    submitted.head()  # without a dashboard
    refused = submitted.team.trainyard("stop", submitted.run)
    assert refused.returncode == 3
    assert "--now" in refused.stderr
    assert len(live(submitted.team, submitted.run)) == 1
    assert submitted.team.trainyard("stop", submitted.run, "--now").returncode == 0
    assert live(submitted.team, submitted.run) == []
