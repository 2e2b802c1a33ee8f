"""Each alert of the chart fires by a real cause, and reaches a webhook by Prometheus and Alertmanager."""

from __future__ import annotations

import http.server
import json
import re
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import (
    CLUSTER_HOME,
    ROOT,
    Object,
    Team,
    cluster_py,
    delete_runs,
    get,
    kubectl,
    wait_for,
)
from drilling import volume_of

PROMETHEUS = "http://127.0.0.1:9090"
CONFIGURATION = CLUSTER_HOME / "live/monitoring/alertmanager.json"
MONITORING = {
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}, "interval": "5s"},
    "prometheusRule": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "stuckMinutes": 1,
        "startMinutes": 1,
        "slowMinutes": 1,
        "attemptsPerHour": 2,
    },
    "progress": {"enabled": True},
}
"""The chart's values; the labels are those by which the Prometheus of tests/cluster selects."""
LIMIT_S = 300.0
EPOCHS = "train.epochs=1000000"
"""A number with which no run ends before it is stopped."""
TRAINING = ("examples/autoencoder.yaml", "--workers", "1", "--set", EPOCHS)
PROGRAM = ("examples/command.yaml", "--workers", "1")
SLOW_DATA = '''
import time

from autoencoder import Autoencoder, Digits


class SlowDigits(Digits):
    """Images that take 5 ms each to read."""

    def __getitem__(self, index):
        time.sleep(0.005)
        return super().__getitem__(index)
'''


class Receiver:
    """A webhook that keeps the alerts that Alertmanager sends."""

    def __init__(self) -> None:
        self._alerts: list[Object] = []
        self._changed = threading.Condition()

    def take(self, message: Object) -> None:
        with self._changed:
            self._alerts += message["alerts"]
            self._changed.notify_all()

    def wait_for(self, alert: str, run: str, status: str = "firing") -> Object:
        """Return an alert about a run, or about its RayJob, whose name begins with that of the run."""

        def matching() -> Object | None:
            return next(
                (
                    each
                    for each in self._alerts
                    if (each["labels"]["alertname"], each["status"]) == (alert, status)
                    and re.fullmatch(rf"{run}(-[0-9a-f]{{8}})?", run_of(each["labels"]))
                ),
                None,
            )

        with self._changed:
            found = self._changed.wait_for(matching, LIMIT_S)
        assert found, f"{alert} of {run} not within {LIMIT_S:g} s\n{state_of_alerts()}"
        return found


def run_of(labels: Object) -> str:
    return str(labels.get("run") or labels.get("name"))


def state_of_alerts() -> str:
    """Return what Prometheus knows of alerts, for a failed test."""
    return json.dumps(ask("alerts"), indent=2)


def ask(what: str, **query: str) -> Any:
    """Ask the HTTP API of Prometheus."""
    url = f"{PROMETHEUS}/api/v1/{what}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)["data"]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.take(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

    (route,) = json.loads(CONFIGURATION.read_text())["receivers"]
    address = urllib.parse.urlsplit(route["webhook_configs"][0]["url"])
    place = (address.hostname or "", address.port or 0)
    with http.server.ThreadingHTTPServer(place, Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield receiver
        server.shutdown()


@pytest.fixture(scope="module")
def team(
    make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Team]:
    """A team whose PodMonitor and alerts Prometheus has read."""
    team = make_team("alerts")
    team.install(tmp_path_factory.mktemp("values"), monitoring=MONITORING)

    def is_watched() -> bool:
        cluster_py("reload-prometheus")
        pools = ask("scrape_pools")["scrapePools"]
        return (
            any(pool.startswith(f"podMonitor/{team.namespace}/") for pool in pools)
            and len(rules_of(team)) == 7
        )

    wait_for("Prometheus has read the chart's objects", is_watched)
    yield team
    delete_runs(team.namespace)


def rules_of(team: Team) -> list[Object]:
    groups = ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    return [rule for rule in rules if rule["labels"]["namespace"] == team.namespace]


def submit(team: Team, name: str, *options: str) -> None:
    ended = team.trainyard("submit", *options, "--name", name, "--detach")
    assert ended.returncode == 0, ended.stderr


def progress(team: Team, run: str) -> Object:
    file = volume_of(team.namespace) / run / "progress.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def wait_for_training(team: Team, run: str, attempt: int = 1) -> Object:
    """Wait until Prometheus has the metrics of an attempt of a run, and return its progress."""
    selector = f'{{namespace="{team.namespace}",run="{run}",attempt="{attempt}"}}'
    for metric in ("step_age_seconds", "samples_per_second"):
        expression = f"ray_trainyard_{metric}{selector}"
        wait_for(f"{expression} is there", lambda query=expression: results(query))
    return progress(team, run)


def results(query: str) -> list[Object]:
    return list(ask("query", query=query)["result"])


def check(team: Team, alert: Object, *words: str) -> None:
    """Check the texts of an alert, and run the commands that it names."""
    labels, annotations = alert["labels"], alert["annotations"]
    assert labels["namespace"] == team.namespace
    assert labels["severity"] in ("info", "warning", "critical")
    assert run_of(labels) in annotations["summary"]
    for word in words:
        assert word in annotations["summary"]
    for command in re.findall(r"`trainyard ((?:explain|logs) [^`]*)`", annotations["description"]):
        *arguments, option, namespace = command.split()
        assert (option, namespace) == ("-n", team.namespace)
        ended = team.trainyard(*arguments)
        assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def hopeless_runs(team: Team) -> None:
    """Three runs that make no step, which start at the same time."""
    submit(team, "absent", *TRAINING, "--set", "image=127.0.0.1:5000/no-such-image:1")
    submit(team, "silent", *PROGRAM, "--set", 'command=["sleep", "100000"]')
    submit(team, "failing", *PROGRAM, "--set", 'command=["false"]', "--set", "faults.retries=0")


@pytest.mark.parametrize(
    ("run", "alert", "words"),
    [
        ("absent", "TrainyardRunNotStarting", "have not started after 1 minutes"),
        ("silent", "TrainyardRunSilent", "told of no step"),
        ("failing", "TrainyardRunFailed", "has failed (Failed)"),
    ],
)
def test_a_run_that_makes_no_step_is_reported(
    team: Team, receiver: Receiver, hopeless_runs: None, run: str, alert: str, words: str
) -> None:
    check(team, receiver.wait_for(alert, run), words)
    ended = team.trainyard("stop", run, "--now")
    assert ended.returncode == 0, ended.stderr


def test_a_run_that_waits_for_data_is_reported(
    team: Team, receiver: Receiver, tmp_path: Path
) -> None:
    for name, text in (
        ("autoencoder.py", (ROOT / "examples/recipes/autoencoder.py").read_text()),
        ("slow_data.py", SLOW_DATA),
    ):
        (tmp_path / name).write_text(text)
    settings = (f"code={tmp_path}", "data.dataset=slow_data:SlowDigits", "data.decode_workers=0")
    submit(team, "hungry", *TRAINING, *(word for each in settings for word in ("--set", each)))
    alert = receiver.wait_for("TrainyardRunWaitsForData", "hungry")
    check(team, alert, "waits for data for")
    ended = team.trainyard("stop", "hungry", "--now")
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def run(team: Team) -> str:
    """A run that trains on and on."""
    submit(team, "busy", *TRAINING)
    wait_for_training(team, "busy")
    return "busy"


def test_the_progress_of_a_run_is_in_a_config_map(team: Team, run: str) -> None:
    command = ("get", "configmap", "trainyard-progress", "-n", team.namespace, "-o", "yaml")

    def line() -> str:
        content = yaml.safe_load(kubectl(*command))
        return str((content.get("data") or {}).get(run, ""))

    parts = r"running, 0\.\d %, step \d+ of 22000000, loss \S+, \d+ d \d+ h left"
    wait_for("the CronJob has written it", lambda: re.fullmatch(parts, line()), LIMIT_S, seen=line)


def pod_of(team: Team, run: str, node_type: str) -> Object:
    """Return the head or the only worker of a run."""
    labels = f"trainyard.io/run={run},ray.io/node-type={node_type}"
    pods = get("pods", team.namespace, "-l", labels)["items"]
    (pod,) = (pod for pod in pods if "deletionTimestamp" not in pod["metadata"])
    return dict(pod)


@contextmanager
def limited_cpu(team: Team, run: str, cpu: str) -> Iterator[None]:
    """Give the container of a run's worker less CPU while it runs."""
    pod = pod_of(team, run, "worker")
    container = pod["spec"]["containers"][0]

    def resize(limit: str) -> None:
        changed = {"name": container["name"], "resources": {"limits": {"cpu": limit}}}
        patch = json.dumps({"spec": {"containers": [changed]}})
        name = pod["metadata"]["name"]
        kubectl(
            "patch", "pod", name, "-n", team.namespace, "--subresource=resize", "--patch", patch
        )

    resize(cpu)
    yield
    resize(container["resources"]["limits"]["cpu"])


def test_a_run_that_is_slower_than_before_is_reported(
    team: Team, receiver: Receiver, run: str
) -> None:
    with limited_cpu(team, run, "200m"):
        check(
            team, receiver.wait_for("TrainyardRunSlow", run), "less than 50 % of its own best speed"
        )
    receiver.wait_for("TrainyardRunSlow", run, status="resolved")


def test_a_run_that_starts_over_again_is_reported(team: Team, receiver: Receiver, run: str) -> None:
    head = pod_of(team, run, "head")["metadata"]["name"]
    kubectl("delete", "pod", head, "-n", team.namespace, "--grace-period=1")
    check(team, receiver.wait_for("TrainyardRunStartsOverAgain", run), "2 attempts within an hour")


def test_a_run_whose_worker_hangs_is_reported(team: Team, receiver: Receiver, run: str) -> None:
    attempt = progress(team, run)["attempt"]
    wait_for_training(team, run, attempt)
    (worker,) = json.loads((volume_of(team.namespace) / run / "workers.json").read_text())[
        "workers"
    ]
    pod = pod_of(team, run, "worker")["metadata"]["name"]

    def send(signal: str) -> None:
        command = ("sh", "-c", f"kill -{signal} {worker['process']}")
        kubectl("exec", pod, "-n", team.namespace, "--", *command)

    send("STOP")
    check(team, receiver.wait_for("TrainyardRunStuck", run), "has made no step for 1 minutes")
    send("CONT")
    receiver.wait_for("TrainyardRunStuck", run, status="resolved")
