"""A RayJob in Git: tools that apply it again and again leave the run alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_cluster import FakeCluster, FakeProcess
from typer.testing import CliRunner

from trainyard.cli.app import app
from trainyard.cli.commands.cluster_runs import control
from trainyard.planning.gitops import CREATE_ONCE, for_git, git_tool_of
from trainyard.planning.objects import run_objects
from trainyard.platform import PlatformQueue, load_platform
from trainyard.run_file.load import load_run

ROOT = Path(__file__).resolve().parents[2]
DIGITS = "examples/digits.yaml"


def rendered(system: Any = "kueue") -> dict[str, Any]:
    queue = PlatformQueue(system=system, name="" if system == "none" else "team")
    platform = load_platform(None).model_copy(update={"queue": queue})
    return run_objects(load_run(ROOT / DIGITS, gpus="16"), platform, "team").job


def test_without_a_tool_nothing_changes() -> None:
    job = rendered()
    assert for_git(job, None) == job


def test_flux_creates_the_rayjob_once() -> None:
    job = rendered()
    made = for_git(job, "flux")
    assert made["metadata"].pop("annotations") == dict([CREATE_ONCE])
    assert made == job
    assert "annotations" not in job["metadata"]


def test_argo_cd_sees_no_difference_once_kueue_has_admitted_the_run() -> None:
    job = rendered()
    assert job["spec"]["suspend"] is True
    made = for_git(job, "argocd")
    assert "suspend" not in made["spec"]
    assert made["metadata"] == job["metadata"]
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    plain = rendered("none")
    assert for_git(plain, "argocd") == plain


def test_the_command_renders_for_a_tool() -> None:
    ended = CliRunner().invoke(
        app, ["render", str(ROOT / DIGITS), "--gpus", "16", "-n", "team", "--gitops", "flux"]
    )
    job = yaml.safe_load(ended.stdout)
    assert job["metadata"]["annotations"] == dict([CREATE_ONCE])
    assert job["metadata"]["name"] == rendered("none")["metadata"]["name"]


@pytest.mark.parametrize(
    ("managers", "tool"),
    [
        ([], None),
        (["kubectl", "kuberay-operator"], None),
        (["kuberay-operator", "kustomize-controller"], "Flux"),
        (["argocd-controller"], "Argo CD"),
    ],
)
def test_a_rayjob_shows_which_tool_has_made_it(managers: list[str], tool: str | None) -> None:
    fields = [{"manager": manager, "operation": "Apply"} for manager in managers]
    assert git_tool_of({"metadata": {"managedFields": fields}}) == tool
    assert git_tool_of({"metadata": {}}) is None


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """A cluster with a live run."""
    cluster = FakeCluster()
    job = cluster.add_job("digits-1", status="RUNNING")
    job["status"]["jobId"] = "digits-1-x"
    job["metadata"]["managedFields"] = [{"manager": "kustomize-controller"}]
    cluster.add_head("digits-1-abc", "")
    cluster.processes = [FakeProcess()]
    cluster.script = [("Complete", "STOPPED")]
    monkeypatch.setattr(control, "open_cluster_to_change", lambda *_: cluster)
    return cluster


def test_stop_warns_that_the_tool_creates_the_rayjob_again(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    control.stop("digits", "team", now=True)
    said = capsys.readouterr().err
    assert "warning: Flux has made this RayJob from Git and creates it again" in said


@pytest.mark.parametrize("is_once", [False, True])
def test_suspend_warns_unless_the_tool_leaves_the_rayjob_alone(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], is_once: bool
) -> None:
    job = cluster.objects["RayJob", "digits-1"]
    job["spec"] = {}
    job["metadata"]["annotations"] = dict([CREATE_ONCE]) if is_once else {}
    control.suspend("digits", "team")
    said = capsys.readouterr().err
    assert ("warning: Flux has made this RayJob" in said) == (not is_once)
