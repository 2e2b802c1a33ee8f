"""A real API server accepts all that the launcher renders, and refuses what the rules refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, Object, Team, get, kubectl, run
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.agreement.variants import VARIANTS, rendered
from tests.launcher.random_runs import KINDS, PLATFORM, Made, documents, plausible
from tests.launcher.rule_cases import API_SERVER, Case
from trainyard.cluster.cluster import Cluster
from trainyard.errors import ClusterError, ConfigError
from trainyard.planning.objects import run_objects
from trainyard.run_file.load import load_run

DIGITS = "examples/digits.yaml"


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("accepted")
    team.install(tmp_path_factory.mktemp("values"))
    return team


@pytest.fixture(scope="module")
def cluster(team: Team) -> Cluster:
    return Cluster(team.namespace)


@pytest.mark.parametrize(("system", "resources", "kuberay"), VARIANTS)
def test_the_api_server_takes_what_is_rendered_and_drops_nothing(
    cluster: Cluster, system: str, resources: str, kuberay: str
) -> None:
    job = rendered(system, resources, kuberay, cluster.namespace)
    stored = cluster.create(job, dry_run=True)
    assert stored["metadata"]["uid"]
    assert _contains(stored["spec"], job["spec"])


@settings(max_examples=300, deadline=None)
@given(
    made=st.sampled_from(list(KINDS)).flatmap(
        lambda kind: st.one_of(
            plausible(kind), documents(kind).map(lambda document: (document, PLATFORM))
        )
    )
)
def test_the_api_server_takes_whatever_is_rendered_of_a_random_run_file(
    cluster: Cluster, made: Made
) -> None:
    document, platform = made
    try:
        job = run_objects(load_run(document), platform, cluster.namespace).job
    except ConfigError:
        event("refused")
        return
    event("rendered")
    assert _contains(cluster.create(job, dry_run=True)["spec"], job["spec"])


def _contains(stored: object, sent: object) -> bool:
    if isinstance(sent, dict):
        return isinstance(stored, dict) and all(
            _contains(stored.get(key), value) for key, value in sent.items()
        )
    if isinstance(sent, list):
        return isinstance(stored, list) and all(map(_contains, stored, sent))
    return stored == sent


@pytest.mark.parametrize("case", [case for case in API_SERVER if "1.6" in case.kuberay], ids=str)
def test_the_api_server_refuses_what_breaks_its_rules_and_takes_what_is_mended(
    cluster: Cluster, case: Case
) -> None:
    cluster.create(_in(cluster, case.build({})), dry_run=True)
    with pytest.raises(ClusterError) as refused:
        cluster.create(_in(cluster, case.build(case.broken)), dry_run=True)
    assert refused.value.reason in ("Invalid", "BadRequest")


def _in(cluster: Cluster, job: Object) -> Object:
    job["metadata"]["namespace"] = cluster.namespace
    return job


def test_a_foreign_manifest_is_checked(team: Team, tmp_path: Path) -> None:
    job = yaml.safe_load(team.trainyard("render", DIGITS, "--from-cluster").stdout)
    job["spec"] |= {"submissionMode": "HttpMode", "backoffLimit": -1}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    kubectl("create", "--dry-run=server", "-f", str(file))  # the API server takes it
    checked = run(ROOT / ".venv/bin/trainyard", "check", file)
    assert checked.returncode == 1
    assert "never submits the job" in checked.stdout


def test_diff_and_submit_hold_a_run_file_against_the_last_submission(team: Team) -> None:
    job = yaml.safe_load(team.trainyard("render", DIGITS, "--from-cluster").stdout)
    job["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    created = Cluster(team.namespace).create(job)
    name = created["metadata"]["name"]
    try:
        same = team.trainyard("diff", DIGITS)
        assert "spec.managedBy" in same.stdout  # the only change: what this test has set
        assert len(same.stdout.splitlines()) == 2
        longer = team.trainyard("diff", DIGITS, "--set", "train.epochs=99", "--json")
        assert longer.returncode == 1
        assert '"config.train.epochs"' in longer.stdout
        patch = '{"status": {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}}'
        place = ("-n", team.namespace, "--subresource=status", "--type=merge", "-p", patch)
        kubectl("patch", "rayjobs.ray.io", name, *place)
        refused = team.trainyard("submit", DIGITS, "--set", "train.seed=7", "--detach")
        assert refused.returncode == 2
        assert "config.train.seed: 0 -> 7" in refused.stderr
        assert len(get("rayjobs.ray.io", team.namespace)["items"]) == 1
    finally:
        kubectl("delete", "rayjobs.ray.io", name, "-n", team.namespace, "--wait=true")
    gone = team.trainyard("diff", DIGITS)
    assert gone.returncode == 2
    assert "there is no run digits" in gone.stderr


def test_platform_diff_tells_what_an_upgrade_would_reach(team: Team, tmp_path: Path) -> None:
    file = tmp_path / "platform.yaml"
    file.write_text(team.trainyard("platform", "get").stdout)
    same = team.trainyard("platform", "diff", "--file", str(file))
    assert (same.returncode, same.stdout) == (0, "")
    changed = yaml.safe_load(file.read_text())
    changed["head"]["memoryGib"] += 1
    file.write_text(yaml.safe_dump(changed))
    found = team.trainyard("platform", "diff", "--file", str(file))
    assert found.returncode == 1
    assert "head.memoryGib" in found.stdout
    assert "submitted runs are not affected" in found.stderr
    command = (
        "helm",
        "template",
        "trainyard",
        "charts/trainyard",
        "--values",
        "tests/cluster/values.yaml",
    )
    apis = ("--api-versions", "ray.io/v1/RayJob", "--api-versions", "ray.io/v1/RayCluster")
    manifests = run(*command, *apis, "--set", f"image={team.image}", "--set", "head.memoryGib=9")
    upgrade = (
        ROOT / ".venv/bin/trainyard",
        "platform",
        "diff",
        "--file",
        "-",
        "-n",
        team.namespace,
    )
    told = run(*upgrade, stdin=manifests.stdout)
    assert told.returncode == 1
    assert {line.split()[0] for line in told.stdout.splitlines()[1:]} >= {"head.memoryGib"}
    assert "the standing cluster, which is recreated" in told.stdout
