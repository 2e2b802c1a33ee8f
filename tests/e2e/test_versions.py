"""A cluster without KubeRay, or with one that does not run or is too old, and how `explain` reports it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator

import pytest
import yaml
from conftest import (
    CLUSTER_HOME,
    ROOT,
    Object,
    Team,
    cluster_py,
    kubectl,
    require_test_cluster,
    run,
    wait_for,
)

pytestmark = pytest.mark.full

DIGITS = "examples/digits.yaml"
OLD = ROOT / "tests/e2e/old_kuberay"
MODULE = "github.com/ray-project/kuberay/ray-operator"
OLD_OPERATOR = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "kuberay-operator",
        "labels": {"app.kubernetes.io/name": "kuberay-operator"},
    },
    "spec": {
        "containers": [{"name": "kuberay-operator", "image": "localhost/kuberay/operator:v1.5.1"}]
    },
}
"""An operator pod with an old image, labelled as by KubeRay's chart. It need not run."""
KINDS = ("rayclusters.ray.io", "rayjobs.ray.io", "rayservices.ray.io")


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("versions")
    team.install(tmp_path_factory.mktemp("values"))
    return team


@pytest.fixture
def no_operator(team: Team) -> Iterator[None]:
    """A cluster with KubeRay's CRDs but without its operator."""
    require_test_cluster("only its KubeRay may be taken away")
    kubectl("delete", "rayjobs", "--all", "--all-namespaces")  # by the operator, which goes then
    cluster_py("stop", "ray-operator")
    yield
    kubectl("delete", "pod", "-n", "default", "--ignore-not-found", "--force", "kuberay-operator")
    cluster_py("start", "ray-operator")


@pytest.fixture
def no_kuberay(no_operator: None) -> Iterator[None]:
    """A cluster without KubeRay's operator and CRDs."""
    kubectl("delete", "crd", *KINDS)
    yield
    kubectl("delete", "crd", "--ignore-not-found", *KINDS)
    kubectl("apply", "--server-side", "-f", str(CLUSTER_HOME / "crds"))
    wait_for_kinds()


def wait_for_kinds() -> None:
    wait_for(
        "the API server knows RayJobs", lambda: run("kubectl", "get", "rayjobs").returncode == 0
    )


def test_a_cluster_without_kuberay_is_told_to_install_it(team: Team, no_kuberay: None) -> None:
    for command in (("submit", DIGITS), ("list",), ("status",)):
        ended = team.trainyard(*command)
        assert ended.returncode == 3, ended.stdout
        assert "make operator" in ended.stderr
    assert finding(team)["failure"] == "missing-crd"


def finding(team: Team) -> Object:
    """Return the finding of `trainyard explain`; empty if it finds no failure."""
    explained = team.trainyard("explain", "digits", "--json")
    assert explained.returncode == 0, explained.stderr
    found: Object | None = json.loads(explained.stdout)["finding"]
    return found or {}


def test_a_cluster_whose_operator_does_not_run_or_is_too_old_is_told_so(
    team: Team, no_operator: None
) -> None:
    assert team.trainyard("submit", DIGITS, "--detach").returncode == 0
    found = wait_for("explain has waited long enough", lambda: finding(team))
    assert found["failure"] == "no-operator"
    said = [each["text"] for each in found["evidence"]]
    assert "no pod and no lease of a KubeRay operator" in said
    kubectl("create", "-n", "default", "-f", "-", stdin=json.dumps(OLD_OPERATOR))
    (job,) = team.rayjobs()
    taken_up = {"status": {"jobDeploymentStatus": "Initializing"}}
    kubectl("patch", "rayjob", job["metadata"]["name"], "-n", team.namespace, "--type=merge",
            "--subresource=status", "-p", json.dumps(taken_up))  # fmt: skip
    found = finding(team)
    assert found["failure"] == "old-operator"
    assert "KubeRay operator is 1.5" in found["cause"]
    assert team.trainyard("stop", "digits", "--now").returncode == 0


def test_a_kuberay_that_is_too_old_is_named(team: Team, no_kuberay: None) -> None:
    listed = ("go", "-C", OLD, "list", "-m", "-f", "{{.Dir}}", MODULE)
    module = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.strip()
    kubectl("create", "-f", f"{module}/config/crd/bases")
    wait_for_kinds()
    refused = team.trainyard("submit", DIGITS)
    assert refused.returncode == 3
    assert 'unknown field "spec.preRunningDeadlineSeconds"' in refused.stderr
    assert "CRDs of KubeRay are too old" in refused.stderr
    # `kubectl` can make the API server drop unknown fields.
    rendered = yaml.safe_load(team.trainyard("render", DIGITS, "--from-cluster").stdout)
    del rendered["spec"]["deletionStrategy"]  # whose remains no KubeRay takes
    kubectl("create", "--validate=ignore", "-f", "-", stdin=json.dumps(rendered))
    assert finding(team)["failure"] == "old-operator"
    kubectl("delete", "rayjobs", "--all", "-n", team.namespace)
