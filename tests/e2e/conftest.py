"""Fixtures for tests on a real cluster that use make, trainyard and kubectl as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support.settings import set_all

if TYPE_CHECKING:
    from bucket import Bucket

ROOT = Path(__file__).resolve().parents[2]
VALUES = ROOT / "tests/cluster/values.yaml"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
LIMIT_S = 300.0
CLUSTER_HOME = Path(
    os.environ.get("TRAINYARD_CLUSTER_HOME") or Path.home() / ".cache/trainyard/cluster"
)
"""The folder of the cluster of tests/cluster."""

Object = dict[str, Any]
Ended = subprocess.CompletedProcess[str]


def run(*command: str | Path, stdin: str | None = None, **environment: str) -> Ended:
    """Run a command and return its result. The output is printed, so that a failing test shows it."""
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"$ {' '.join(map(str, command))}\n{ended.stdout}{ended.stderr}[exit {ended.returncode}]")
    return ended


def set_options(settings: Iterable[str]) -> list[str]:
    """Return the options of a command that change keys of a run file."""
    return [word for setting in settings for word in ("--set", setting)]


def kubectl(*arguments: str, stdin: str | None = None) -> str:
    ended = run("kubectl", *arguments, stdin=stdin)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def get(kind: str, namespace: str, *arguments: str) -> Object:
    found: Object = json.loads(kubectl("get", kind, "-n", namespace, *arguments, "-o", "json"))
    return found


def require_test_cluster(why: str) -> None:
    """Skip the test unless the cluster of tests/cluster is in use, because it would disturb another one."""
    if os.environ.get("KUBECONFIG") != str(CLUSTER_HOME / "kubeconfig"):
        pytest.skip(why)


def cluster_py(*words: str) -> None:
    """Run a command of tests/cluster/cluster.py."""
    ended = run(sys.executable, ROOT / "tests/cluster/cluster.py", *words)
    assert ended.returncode == 0, ended.stderr


def wait_for(
    what: str,
    condition: Callable[[], Any],
    limit_s: float = LIMIT_S,
    *,
    seen: Callable[[], Any] = lambda: "",
) -> Any:
    """Wait until the condition returns a true value, and return it.

    After the time limit, fail with `what` and with the result of `seen`.
    """
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:g} s {seen()}"
        time.sleep(1)  # between two looks, not for something to happen
    return found


class Team:
    """A namespace with the platform, and the commands of its users."""

    def __init__(self, namespace: str, image: str) -> None:
        self.namespace = namespace
        self.image = image

    def make(self, target: str, *variables: str) -> Ended:
        return run(
            "make", "--no-print-directory", target, f"NAMESPACE={self.namespace}", *variables
        )

    def trainyard(self, *arguments: str, **environment: str) -> Ended:
        command = (ROOT / ".venv/bin/trainyard", *arguments, "-n", self.namespace)
        return run(*command, **environment)

    def at_once(self, *commands: Sequence[str]) -> list[Ended]:
        """Run several `trainyard` commands at the same time, and return their results in the same order."""
        with ThreadPoolExecutor(len(commands)) as threads:
            return list(threads.map(lambda command: self.trainyard(*command), commands))

    def install(self, tmp_path: Path, **changes: Any) -> None:
        """Run `make platform` with the small values of the test cluster and the given changes."""
        values = yaml.safe_load(VALUES.read_text())
        set_all(values, changes)
        file = tmp_path / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        ended = self.make("platform", f"VALUES={file}", f"IMAGE={self.image}")
        assert ended.returncode == 0, ended.stderr

    def status(self, name: str) -> Object:
        ended = self.trainyard("status", name, "--json")
        assert ended.returncode == 0, ended.stderr
        found: Object = json.loads(ended.stdout)
        return found

    def rayjobs(self) -> list[Object]:
        jobs: list[Object] = get("rayjobs.ray.io", self.namespace)["items"]
        return jobs

    def pods(self, **labels: str) -> list[Object]:
        selector = ",".join(
            f"ray.io/{key.replace('_', '-')}={value}" for key, value in labels.items()
        )
        pods: list[Object] = get("pods", self.namespace, "-l", selector)["items"]
        return pods


@pytest.fixture(scope="session")
def image(request: pytest.FixtureRequest) -> str:
    """The image that `make e2e` has built and pushed."""
    name: str = request.config.getoption("--image")
    return name


@pytest.fixture(scope="module")
def make_team(image: str) -> Iterator[Callable[[str], Team]]:
    """A function that creates teams in new namespaces that enforce `restricted`.

    The namespaces are deleted after the file's tests, because the heads of failed runs use the node's
    memory.
    """
    made: list[str] = []

    def make(name: str) -> Team:
        namespace = f"trainyard-e2e-{name}"
        delete(namespace)
        labels = {"apiVersion": "v1", "kind": "Namespace"}
        metadata = {"name": namespace, "labels": RESTRICTED}
        kubectl("create", "-f", "-", stdin=json.dumps(labels | {"metadata": metadata}))
        made.append(namespace)
        return Team(namespace, image)

    yield make
    for namespace in made:
        delete(namespace, "--wait=false")


def delete(namespace: str, *options: str) -> None:
    """Delete a namespace, after the objects with a finalizer of the operator, which needs the namespace."""
    delete_runs(namespace)
    kubectl("delete", "namespace", namespace, "--ignore-not-found", *options)


def delete_runs(namespace: str) -> None:
    """Delete the pods of a namespace, and its RayJobs and RayClusters, and wait until those two are gone.

    Pods are deleted without their grace period of up to 90 s: they have nothing to save. The operator may
    create a pod while its RayCluster is being deleted, so pods are deleted until there is no RayCluster.
    A worker whose init container still waits for the head takes 90 s to end even so: bash ignores SIGTERM.
    """
    kinds = "rayjobs.ray.io,rayclusters.ray.io"
    kubectl("delete", kinds, "--all", "-n", namespace, "--wait=false")

    def are_gone() -> bool:
        have_gone = not get(kinds, namespace)["items"]
        kubectl("delete", "pods", "--all", "-n", namespace, "--grace-period=1", "--wait=false")
        return have_gone

    wait_for(f"namespace {namespace} has no runs", are_gone)


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    from bucket import running_bucket  # which needs this module

    with running_bucket(tmp_path_factory.mktemp("s3") / "server") as bucket:
        yield bucket


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    """The first team, with the platform installed."""
    team = make_team("first")
    team.install(tmp_path_factory.mktemp("values"))
    return team
