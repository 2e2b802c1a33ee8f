"""The life cycle of the chart on a real cluster: install, upgrade, test, uninstall."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, VALUES, Ended, Object, Team, get, kubectl, run, wait_for
from crd_schemas import PROMETHEUS, module_folder
from helm_chart import render
from kubernetes_versions import is_known
from test_chart_matrix import FACTORS, pairwise, values_of

BEFORE = "a5a1ba0"
"""The commit with the previous version of the chart."""
CHART = ROOT / "charts/trainyard"
RELEASE = "trainyard"
HEAD = "app.kubernetes.io/part-of=trainyard,ray.io/node-type=head"
EVERYTHING: Object = {
    "prePull": {"enabled": True, "pools": ["cpu"]},
    "quotas": {
        "hard": dict.fromkeys(("requests.cpu", "limits.cpu"), "60")
        | dict.fromkeys(("requests.memory", "limits.memory"), "60Gi"),
        "limitRange": {"max": {"cpu": "32"}},
    },
    "disruptionBudget": {"heads": True},
    "rayCluster": {"enabled": True},
    "security": {"networkPolicy": {"enabled": True, "apiServerCidrs": ["198.18.0.1/32"]}},
    "queue": {"system": "volcano", "name": "vision"},
    "priorityClasses": [{"name": "trainyard-e2e", "value": 1, "description": "A test."}],
    "launcher": {
        "rbac": {"subjects": [{"kind": "User", "name": "ada"}]},
        "clusterRbac": {"create": True},
    },
    "monitoring": {"dashboards": {"enabled": True}},
}


class Release:
    """A release of the chart in a team's namespace."""

    def __init__(self, team: Team, folder: Path) -> None:
        self.namespace, self.image, self.folder = team.namespace, team.image, folder

    def helm(self, *arguments: str | Path) -> Ended:
        return run("helm", *arguments, "--namespace", self.namespace)

    def install(self, values: Object, chart: Path = CHART, small: Path = VALUES) -> None:
        """Install or upgrade the release. The small values of the test cluster are the defaults."""
        file = self.folder / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        ended = self.helm(
            "upgrade", "--install", RELEASE, chart, "--set", f"image={self.image}",
            "--values", small, "--values", file, "--wait", "--timeout", "180s",
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr

    def uninstall(self) -> None:
        ended = self.helm("uninstall", RELEASE, "--wait")
        assert ended.returncode == 0, ended.stderr

    def claims(self) -> dict[str, str]:
        """Return the UIDs of the namespace's claims by name."""
        items = get("persistentvolumeclaims", self.namespace)["items"]
        return {one["metadata"]["name"]: one["metadata"]["uid"] for one in items}

    def names(
        self, kind: str, selector: str = f"app.kubernetes.io/instance={RELEASE}"
    ) -> list[str]:
        items = get(kind, self.namespace, "--selector", selector)["items"]
        return [one["metadata"]["name"] for one in items]


@pytest.fixture(scope="module")
def release(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Release:
    return Release(make_team("chart"), tmp_path_factory.mktemp("chart"))


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source tree of the previous version: its chart and the values with which it was tested."""
    folder = tmp_path_factory.mktemp("before")
    archive = subprocess.run(
        ["git", "archive", BEFORE, "charts/trainyard", "tests/cluster/values.yaml"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if archive.returncode != 0:
        pytest.skip(f"this checkout does not have the commit {BEFORE}")
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    return folder


@pytest.fixture(scope="module")
def first_claim(release: Release, before: Path) -> dict[str, str]:
    """The claim that the previous version has created, with a run's file in it."""
    release.install({}, before / "charts/trainyard", before / "tests/cluster/values.yaml")
    claims = release.claims()
    assert list(claims) == ["trainyard-storage"]
    wait_for(
        "the claim is bound",
        lambda: all(
            one["status"]["phase"] == "Bound"
            for one in get("persistentvolumeclaims", release.namespace)["items"]
        ),
    )
    return claims


def test_an_upgrade_keeps_the_claim(release: Release, first_claim: dict[str, str]) -> None:
    refused = release.helm("upgrade", RELEASE, CHART, "--reuse-values")
    assert "missing properties" in refused.stderr
    ended = release.helm("upgrade", RELEASE, CHART, "--reset-then-reuse-values")
    assert ended.returncode == 0, ended.stderr
    release.install({})
    assert release.claims() == first_claim
    listed = json.loads(release.helm("list", "--output", "json").stdout)
    assert listed[0]["chart"] == f"trainyard-{chart_version()}"
    assert release.names("networkpolicies") == []


def chart_version() -> str:
    version: str = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    return version


def test_helm_test_proves_the_storage(release: Release, first_claim: dict[str, str]) -> None:
    ended = release.helm("test", RELEASE, "--timeout", "180s")
    assert ended.returncode == 0, ended.stderr
    # A remaining pod would keep the claim in use.
    assert get("pods", release.namespace)["items"] == []


def test_a_storage_that_does_not_answer_fails_the_test_and_its_pod_says_why(
    release: Release, first_claim: dict[str, str]
) -> None:
    s3 = {"path": "s3://nowhere/runs", "endpoint": "http://127.0.0.1:1"}
    release.install({"storage": {"claim": None, "s3": s3}})
    assert release.claims() == first_claim
    assert release.helm("test", RELEASE, "--timeout", "180s").returncode != 0
    assert '"write"' in kubectl("logs", "trainyard-probe-storage", "-n", release.namespace)


def test_everything_at_once_is_taken_and_its_pods_run(
    release: Release, first_claim: dict[str, str]
) -> None:
    release.install(EVERYTHING)
    assert release.claims() == first_claim
    assert release.names("networkpolicies") == ["trainyard-heads", "trainyard-runs"]
    assert release.names("resourcequotas") == ["trainyard"]
    assert len(release.names("configmaps")) == 3
    wait_for(
        "the image waits on the node",
        lambda: get("daemonsets", release.namespace)["items"][0]["status"].get("numberReady") == 1,
    )
    wait_for(
        "the standing cluster is there under its quota", lambda: len(running(release)) == 2, 600
    )


def running(release: Release) -> list[Object]:
    """Return the pods of the standing cluster, once they are ready."""
    items = get("pods", release.namespace, "--selector", "ray.io/cluster=trainyard")["items"]
    return [
        pod
        for pod in items
        if any(
            (one["type"], one["status"]) == ("Ready", "True")
            for one in pod["status"].get("conditions", [])
        )
    ]


def test_the_ports_that_the_monitor_asks_tell_of_the_node(release: Release) -> None:
    """Check the head and the worker, whose port the operator adds."""
    ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8080/metrics').read().decode())"
    pods = running(release)
    assert len(pods) == 2
    for pod in pods:
        ports = pod["spec"]["containers"][0]["ports"]
        assert {"name": "metrics", "containerPort": 8080, "protocol": "TCP"} in ports
        name = pod["metadata"]["name"]
        told = kubectl("exec", "-n", release.namespace, name, "--", "python", "-c", ask)
        assert "ray_node_cpu_utilization" in told


def test_a_head_is_not_evicted_and_a_worker_may_be(release: Release) -> None:
    by_type = {pod["metadata"]["labels"]["ray.io/node-type"]: pod for pod in running(release)}
    refused = evict(release, by_type["head"])
    assert refused.returncode != 0
    assert "disruption budget" in refused.stderr
    assert evict(release, by_type["worker"]).returncode == 0


def evict(release: Release, pod: Object) -> Ended:
    name = pod["metadata"]["name"]
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": release.namespace},
    }
    path = f"/api/v1/namespaces/{release.namespace}/pods/{name}/eviction"
    return run("kubectl", "create", "--raw", path, "-f", "-", stdin=json.dumps(body))


@pytest.mark.parametrize(
    ("verb", "resource", "may"),
    [
        ("create", "rayjobs.ray.io", "yes"),
        ("create", "pods/portforward", "yes"),
        ("list", "resourcequotas", "yes"),
        ("delete", "rayclusters.ray.io", "no"),
        ("create", "configmaps", "no"),
        ("list", "secrets", "no"),
        ("list", "nodes", "yes"),
        ("delete", "nodes", "no"),
    ],
)
def test_who_submits_has_just_these_rights(
    release: Release, verb: str, resource: str, may: str
) -> None:
    asked = run("kubectl", "auth", "can-i", verb, resource, "--as", "ada", "-n", release.namespace)
    assert asked.stdout.strip() == may


@pytest.fixture
def prometheus_kinds() -> Iterator[None]:
    """The CRDs of PodMonitor and PrometheusRule, installed during the test."""
    prometheus = module_folder(PROMETHEUS)
    if prometheus is None:
        pytest.skip(f"the module {PROMETHEUS} is not there, see tests/charts/crds/go.mod")
    folder = prometheus / "example/prometheus-operator-crd"
    files = [
        folder / f"monitoring.coreos.com_{name}.yaml" for name in ("podmonitors", "prometheusrules")
    ]
    names = [f"{file.stem.partition('_')[2]}.monitoring.coreos.com" for file in files]
    if run("kubectl", "get", "crd", *names).returncode == 0:
        yield  # somebody else's, so they stay
        return
    for file in files:
        kubectl("apply", "--server-side", "-f", str(file))
    wait_for("their kinds are there", lambda: all(established(name) for name in names))
    yield
    kubectl("delete", "crd", *names)


def established(name: str) -> bool:
    """Return whether the API server knows a kind. `kubectl wait` fails for a CRD without conditions."""
    conditions = get("customresourcedefinitions", "", name)["status"].get("conditions") or []
    return any((one["type"], one["status"]) == ("Established", "True") for one in conditions)


def test_monitors_and_rules_are_taken(release: Release, prometheus_kinds: None) -> None:
    enabled: dict[str, Any] = {"enabled": True}
    release.install({"monitoring": {"podMonitor": enabled, "prometheusRule": enabled}})
    assert release.names("podmonitors.monitoring.coreos.com") == ["trainyard-runs"]
    assert release.names("prometheusrules.monitoring.coreos.com") == ["trainyard-runs"]
    release.install({})  # before their kinds go


def test_any_mixture_of_values_is_taken_by_the_api_server(make_team: Callable[[str], Team]) -> None:
    """Check with a dry run and strict validation. Kinds that the cluster does not have are skipped."""
    namespace = make_team("mixtures").namespace
    # Pods are admitted only if their service account exists, which a dry run does not create.
    kubectl("create", "serviceaccount", "trainyard-run", "-n", namespace)
    dry = ("apply", "--dry-run=server", "--validate=strict", "-n", namespace, "-f", "-")
    for mixture in pairwise(FACTORS):
        objects = [
            one
            for one in render(values_of(mixture))
            if is_known(one) or one["apiVersion"].startswith("ray.io/")
        ]
        kubectl(*dry, stdin=yaml.safe_dump_all(objects))


def test_what_the_cluster_lacks_is_refused_with_a_sentence(release: Release) -> None:
    ended = release.helm(
        "upgrade", RELEASE, CHART, "--reuse-values",
        "--set", "queue.system=kueue,queue.name=runs,queue.kueue.clusterQueue=vision",
    )  # fmt: skip
    assert ended.returncode != 0
    assert "Install Kueue first" in ended.stderr


def test_switched_off_means_gone(release: Release) -> None:
    release.install({})
    assert release.names("networkpolicies") == []
    assert release.names("daemonsets.apps") == []
    wait_for("the standing cluster's pods go", lambda: running(release) == [])
    assert run("kubectl", "get", "priorityclass", "trainyard-e2e").returncode != 0


def test_models_outlive_the_chart(release: Release, first_claim: dict[str, str]) -> None:
    release.uninstall()
    assert release.claims() == first_claim
    assert release.names("configmaps") == []
    release.install({})
    assert release.claims() == first_claim


@pytest.mark.full
def test_the_claim_goes_when_told_so(release: Release, first_claim: dict[str, str]) -> None:
    release.install({"storage": {"claim": {"keep": False}}})
    assert release.claims() == first_claim
    release.uninstall()
    wait_for("the claim is gone", lambda: release.claims() == {})


def test_a_namespace_of_the_chart_has_its_level_and_outlives_it(tmp_path: Path, image: str) -> None:
    namespace = "trainyard-e2e-own"
    kubectl("delete", "namespace", namespace, "--ignore-not-found")
    kubectl("create", "namespace", namespace)
    values = tmp_path / "values.yaml"
    choices = {"security": {"namespace": {"create": True}}, "storage": {"claim": {"create": False}}}
    values.write_text(yaml.safe_dump(choices))
    ended = run(
        "helm", "install", RELEASE, CHART, "--namespace", namespace,
        "--take-ownership", "--set", f"image={image}", "--values", values,
    )  # fmt: skip
    try:
        assert ended.returncode == 0, ended.stderr
        found = json.loads(kubectl("get", "namespace", namespace, "-o", "json"))
        assert found["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
        assert run("helm", "uninstall", RELEASE, "-n", namespace).returncode == 0
        found = json.loads(kubectl("get", "namespace", namespace, "-o", "json"))
        assert found["status"]["phase"] == "Active"
    finally:
        kubectl("delete", "namespace", namespace)
