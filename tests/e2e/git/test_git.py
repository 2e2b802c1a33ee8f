"""Runs that are kept in Git and applied by Flux, in a queue of Kueue."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Object, Team, delete_runs, kubectl, run, wait_for
from drilling import volume_of
from repository import Repository, repository_of

LIMIT_S = 400.0
QUEUE = {
    "queue": {
        "system": "kueue",
        "name": "runs",
        "kueue": {"clusterQueue": "e2e-git", "nodes": {"cpu": 1}, "runs": 1},
    }
}
SMALL = ("--workers", "1", "--set", "train.model.image_size=16")
RUN = ("examples/digits.yaml", *SMALL, "--from-cluster")
LONG = "train.epochs=100000"
PAGE = ROOT / "docs/guides/gitops.md"
NODE_ADDRESS = "198.18.0.1"


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("git")
    team.install(tmp_path_factory.mktemp("values"), **QUEUE)
    return team


@pytest.fixture(autouse=True)
def empty_queue(team: Team) -> Iterator[None]:
    """Each test ends with an empty queue."""
    yield
    delete_runs(team.namespace)


@pytest.fixture
def repository(team: Team, empty_queue: None, tmp_path: Path) -> Iterator[Repository]:
    """A repository that Flux applies to the team's namespace, until the test ends."""
    with repository_of(team.namespace, tmp_path) as repository:
        yield repository


def render(team: Team, repository: Repository, name: str, *options: str) -> None:
    """Write the RayJob of a run into a repository."""
    ended = team.trainyard("render", *RUN, "--name", name, *options)
    assert ended.returncode == 0, ended.stderr
    (repository.folder / f"{name}.yaml").write_text(ended.stdout)


def the_job(team: Team, name: str) -> Object:
    (job,) = (job for job in team.rayjobs() if job["metadata"]["name"].startswith(f"{name}-"))
    return job


def ray_cluster(team: Team, name: str) -> str:
    """Return the name of the RayCluster of a run; empty while it has none."""
    return str(the_job(team, name)["status"].get("rayClusterName", ""))


def await_phase(team: Team, name: str, *phases: str) -> None:
    def row() -> Object:
        (found,) = team.status(name)["submissions"]
        return dict(found)

    wait_for(f"{name} is {phases}", lambda: row()["phase"] in phases, LIMIT_S, seen=row)


def steps(team: Team, name: str, attempt: int = 1) -> int:
    """Return the steps of a run that an attempt has reached."""
    file = volume_of(team.namespace) / name / "progress.json"
    progress = json.loads(file.read_text()) if file.exists() else {"attempt": 0}
    return int(progress["step"]) if progress["attempt"] >= attempt else 0


def await_training(team: Team, name: str, attempt: int = 1) -> int:
    """Wait until an attempt of a run trains, and return its step."""
    reached: int = wait_for(
        f"attempt {attempt} of {name} trains", lambda: steps(team, name, attempt), LIMIT_S
    )
    wait_for("it goes on", lambda: steps(team, name, attempt) > reached, LIMIT_S)
    return reached


def test_a_run_that_was_rendered_for_flux_goes_on_at_each_reconciliation(
    team: Team, repository: Repository
) -> None:
    render(team, repository, "flux", "--set", LONG, "--gitops", "flux")
    repository.commit()
    await_training(team, "flux")
    first = ray_cluster(team, "flux")
    for _ in range(3):
        repository.reconcile()
    await_training(team, "flux")
    assert ray_cluster(team, "flux") == first

    suspended = team.trainyard("suspend", "flux")
    assert suspended.returncode == 0, suspended.stderr
    assert "from Git" not in suspended.stderr
    repository.reconcile()
    await_phase(team, "flux", "suspended")


def test_a_run_that_was_rendered_for_argo_cd_goes_on_when_it_is_applied_again(
    team: Team,
) -> None:
    """Argo CD applies as kubectl does, by a field manager of its own."""
    rendered = team.trainyard("render", *RUN, "--name", "argo", "--set", LONG, "--gitops", "argocd")
    assert rendered.returncode == 0, rendered.stderr

    def apply() -> None:
        how = ("--field-manager=argocd-controller", "-n", team.namespace, "-f", "-")
        kubectl("apply", *how, stdin=rendered.stdout)

    apply()
    await_phase(team, "argo", "running")
    first = ray_cluster(team, "argo")
    apply()
    await_training(team, "argo")
    assert ray_cluster(team, "argo") == first

    suspended = team.trainyard("suspend", "argo")
    assert suspended.returncode == 0, suspended.stderr
    assert "Argo CD has made this RayJob from Git" in suspended.stderr


def test_a_run_that_was_not_rendered_for_git_is_torn_down_at_a_reconciliation(
    team: Team, repository: Repository
) -> None:
    render(team, repository, "plain", "--set", LONG)
    repository.commit()
    await_phase(team, "plain", "starting", "submitting", "running")
    first = ray_cluster(team, "plain")
    repository.reconcile()
    wait_for(
        "its RayCluster is another one",
        lambda: ray_cluster(team, "plain") not in ("", first),
        LIMIT_S,
    )


def test_a_run_that_is_stopped_comes_back_until_it_is_removed_from_git(
    team: Team, repository: Repository
) -> None:
    render(team, repository, "kept", "--set", LONG, "--gitops", "flux")
    repository.commit()
    await_training(team, "kept")
    stopped = team.trainyard("stop", "kept")
    assert stopped.returncode == 0, stopped.stderr
    assert "Flux has made this RayJob from Git and creates it again" in stopped.stderr
    saved = steps(team, "kept")
    repository.reconcile()
    assert await_training(team, "kept", attempt=2) >= saved

    (repository.folder / "kept.yaml").unlink()
    repository.commit()
    wait_for("its pods and its RayJob are gone", lambda: not team.pods() + team.rayjobs(), LIMIT_S)
    # The name of a checkpoint is the number of samples. progress.json may be a second older.
    folder = volume_of(team.namespace) / "kept"
    saved_samples = max(int(each.name[1:13]) for each in (folder / "checkpoints").iterdir())
    assert saved_samples >= json.loads((folder / "progress.json").read_text())["samples"] > 0


@pytest.fixture
def messages() -> Iterator[tuple[str, list[Object]]]:
    """The address of a receiver of messages, and what it has received."""
    received: list[Object] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

    with http.server.ThreadingHTTPServer((NODE_ADDRESS, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{NODE_ADDRESS}:{server.server_port}/", received
        server.shutdown()


def test_a_run_that_has_ended_and_is_created_again_trains_nothing_and_sends_no_second_message(
    team: Team, repository: Repository, messages: tuple[str, list[Object]]
) -> None:
    address, received = messages
    short = ("--set", "train.epochs=1", "--set", f"notify.url={address}", "--gitops", "flux")
    render(team, repository, "done", *short)
    repository.commit()
    await_phase(team, "done", "succeeded")
    trained = steps(team, "done")
    kubectl("delete", "rayjob", the_job(team, "done")["metadata"]["name"], "-n", team.namespace)
    repository.reconcile()
    began = time.monotonic()
    await_phase(team, "done", "succeeded")
    print(f"ended {time.monotonic() - began:.0f} s after it was created again")
    assert "the run is trained already" in team.trainyard("logs", "done").stdout
    assert steps(team, "done", attempt=2) == trained
    assert [each["outcome"] for each in received] == ["succeeded"]


def commands_of_the_page() -> list[str]:
    """Return the commands of the page about GitOps, without their comments."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    joined = "".join(blocks).replace("\\\n", "")
    return [line.partition("  #")[0].strip() for line in joined.splitlines()]


def test_each_command_of_the_page_works(team: Team, tmp_path: Path) -> None:
    """The page names a namespace `team`, GPUs, and files that a reader has."""
    digits = (ROOT / "examples/digits.yaml").read_text()
    (tmp_path / "run.yaml").write_text(digits.replace("epochs: 12", "epochs: 1"))
    (tmp_path / "my-values.yaml").write_text(f"image: {team.image}\n")
    (tmp_path / "charts").symlink_to(ROOT / "charts")
    path = f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"
    commands = commands_of_the_page()
    assert len(commands) >= 8
    for command in commands:
        here = command.replace("--gpus 16", "--workers 1").replace(
            "-n team", f"-n {team.namespace}"
        )
        in_folder = f"cd {shlex.quote(str(tmp_path))} && {here}"
        ended = run("bash", "-o", "pipefail", "-c", in_folder, PATH=path)
        # `diff` has nothing to report, since `kubectl apply` has created the same.
        assert ended.returncode == 0, command
