"""A real cluster, seen through make, trainyard and kubectl, as a user sees it."""

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

if TYPE_CHECKING:
    from bucket import Bucket

ROOT = Path(__file__).resolve().parents[2]
VALUES = ROOT / "tests/cluster/values.yaml"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
LIMIT_S = 300.0
CLUSTER_HOME = Path(
    os.environ.get("TRAINYARD_CLUSTER_HOME") or Path.home() / ".cache/trainyard/cluster"
)
"""Where the cluster of tests/cluster lies."""

Object = dict[str, Any]
Ended = subprocess.CompletedProcess[str]


def run(*command: str | Path, stdin: str | None = None, **environment: str) -> Ended:
    """The ended command; its output is printed, so a failing test shows it."""
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
    """Changes of a run file, as commands take them."""
    return [word for setting in settings for word in ("--set", setting)]


def kubectl(*arguments: str, stdin: str | None = None) -> str:
    ended = run("kubectl", *arguments, stdin=stdin)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def get(kind: str, namespace: str, *arguments: str) -> Object:
    found: Object = json.loads(kubectl("get", kind, "-n", namespace, *arguments, "-o", "json"))
    return found


def require_test_cluster(why: str) -> None:
    """Skip what only the cluster of tests/cluster may suffer: another one is in use."""
    if os.environ.get("KUBECONFIG") != str(CLUSTER_HOME / "kubeconfig"):
        pytest.skip(why)


def cluster_py(*words: str) -> None:
    """A command to the test cluster's own program."""
    ended = run(sys.executable, ROOT / "tests/cluster/cluster.py", *words)
    assert ended.returncode == 0, ended.stderr


def wait_for(what: str, condition: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """What the condition returns once it is true. Fails with `what` after the limit."""
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {limit_s:g} s"
        time.sleep(1)  # between two looks, not for something to happen
    return found


class Team:
    """A namespace with the platform in it, and the commands of its users."""

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
        """Run several command lines of `trainyard` at once; returns how each has ended, in this order."""
        with ThreadPoolExecutor(len(commands)) as threads:
            return list(threads.map(lambda command: self.trainyard(*command), commands))

    def install(self, tmp_path: Path, **changes: Any) -> None:
        """`make platform` with the small values of the test cluster, and some changed."""
        values = yaml.safe_load(VALUES.read_text())
        for path, value in changes.items():
            *sections, key = path.split("__")
            section = values
            for name in sections:
                section = section.setdefault(name, {})
            section[key] = value
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
    """The image that `make e2e` built and pushed."""
    name: str = request.config.getoption("--image")
    return name


@pytest.fixture(scope="module")
def make_team(image: str) -> Iterator[Callable[[str], Team]]:
    """Teams in fresh namespaces that enforce `restricted`; they go, and the heads that failed runs
    keep with them, before the next file's tests need the node's memory."""
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
        delete(namespace)


def delete(namespace: str) -> None:
    """What the operator answers for goes first: to let go of it, it needs the namespace.

    Pods go at once; they may stay for up to 90 s, and here is nothing for them to save.
    """
    of_the_operator = ("rayjobs.ray.io,rayclusters.ray.io", "--all", "-n", namespace)
    kubectl("delete", *of_the_operator, "--wait=false")
    kubectl("delete", "pods", "--all", "-n", namespace, "--grace-period=1")
    kubectl("delete", *of_the_operator)
    kubectl("delete", "namespace", namespace, "--ignore-not-found")


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
