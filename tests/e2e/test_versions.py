"""A cluster without KubeRay, and one whose KubeRay is too old: both are named, with what to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, Team, kubectl, run, wait_for

DIGITS = "examples/digits.yaml"
OLD = ROOT / "tests/e2e/old_kuberay"
MODULE = "github.com/ray-project/kuberay/ray-operator"
KINDS = ("rayclusters.ray.io", "rayjobs.ray.io", "rayservices.ray.io")


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("versions")
    team.install(tmp_path_factory.mktemp("values"))
    return team


@pytest.fixture
def no_kuberay(team: Team) -> Iterator[None]:
    """Neither operator nor definitions, for a while."""
    home = os.environ.get("TRAINYARD_CLUSTER_HOME") or Path.home() / ".cache/trainyard/cluster"
    if os.environ.get("KUBECONFIG") != str(Path(home) / "kubeconfig"):
        pytest.skip("only the KubeRay of tests/cluster may be taken away")
    cluster = (sys.executable, ROOT / "tests/cluster/cluster.py")
    kubectl("delete", "rayjobs", "--all", "--all-namespaces")  # by the operator, which goes then
    assert run(*cluster, "stop", "ray-operator").returncode == 0
    kubectl("delete", "crd", *KINDS)
    yield
    kubectl("delete", "crd", "--ignore-not-found", *KINDS)
    kubectl("apply", "--server-side", "-f", str(Path(home) / "crds"))
    wait_for_kinds()
    assert run(*cluster, "start", "ray-operator").returncode == 0


def wait_for_kinds() -> None:
    wait_for(
        "the API server knows RayJobs", lambda: run("kubectl", "get", "rayjobs").returncode == 0
    )


def test_a_cluster_without_kuberay_is_told_to_install_it(team: Team, no_kuberay: None) -> None:
    for command in (("submit", DIGITS), ("list",), ("status",)):
        ended = team.trainyard(*command)
        assert ended.returncode == 3, ended.stdout
        assert "make operator" in ended.stderr
    explained = team.trainyard("explain", "digits", "--json")
    assert explained.returncode == 0, explained.stderr
    assert json.loads(explained.stdout)["finding"]["failure"] == "missing-crd"


def test_a_kuberay_that_is_too_old_is_named(team: Team, no_kuberay: None) -> None:
    listed = ("go", "-C", OLD, "list", "-m", "-f", "{{.Dir}}", MODULE)
    module = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.strip()
    kubectl("create", "-f", f"{module}/config/crd/bases")
    wait_for_kinds()
    refused = team.trainyard("submit", DIGITS)
    assert refused.returncode == 3
    assert 'unknown field "spec.preRunningDeadlineSeconds"' in refused.stderr
    assert "CRDs of KubeRay are too old" in refused.stderr
    # `kubectl` can be told to let the API server drop what it does not know.
    rendered = yaml.safe_load(team.trainyard("render", DIGITS, "--from-cluster").stdout)
    del rendered["spec"]["deletionStrategy"]  # whose remains no KubeRay takes
    kubectl("create", "--validate=ignore", "-f", "-", stdin=json.dumps(rendered))
    explained = team.trainyard("explain", "digits", "--json")
    assert explained.returncode == 0, explained.stderr
    finding = json.loads(explained.stdout)["finding"]
    assert finding["failure"] == "old-operator", finding
    kubectl("delete", "rayjobs", "--all", "-n", team.namespace)
