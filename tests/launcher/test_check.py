"""`trainyard check`: manifests of anyone, by KubeRay's rules; data on standard output, exit 1 with errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launcher.rayjobs import Object, raycluster, rayjob
from trainyard.errors import ConfigError
from trainyard.planning.objects import run_objects
from trainyard.platform import load_platform
from trainyard.run_file.load import load_run

ROOT = Path(__file__).resolve().parents[2]
BROKEN = {"spec.submissionMode": "HttpMode", "spec.rayClusterSpec.workerGroupSpecs.0.replicas": 1}


def check(*arguments: str, documents: list[Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainyard", "check", "-", *arguments],
        cwd=ROOT,
        input=yaml.safe_dump_all(documents),
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_obeys_the_rules_prints_nothing_and_exits_with_0() -> None:
    ended = check(documents=[rayjob({}), {"kind": "Service"}, None, raycluster({})])
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "2 checked by the rules of KubeRay 1.6, 0 errors, 0 warnings" in ended.stderr


def test_findings_are_a_table_with_value_rule_and_remedy() -> None:
    ended = check(documents=[rayjob(BROKEN)])
    assert ended.returncode == 1
    heading, error, warning = ended.stdout.splitlines()
    assert heading.split() == ["severity", "object", "path", "value", "problem", "remedy"]
    assert error.startswith("error")
    assert "'HttpMode'" in error
    assert "Use one of K8sJobMode, HTTPMode" in error
    assert warning.startswith("warning")


def test_findings_are_json_when_asked_for() -> None:
    ended = check("--json", documents=[rayjob(BROKEN)])
    found = json.loads(ended.stdout)
    assert [one["rule"] for one in found] == ["submission-mode", "replicas-range"]
    assert found[0]["object"] == "RayJob digits-0123abcd"
    assert found[0]["path"] == "spec.submissionMode"


def test_warnings_alone_exit_with_0() -> None:
    ended = check(documents=[rayjob({"spec.rayClusterSpec.workerGroupSpecs.0.replicas": 1})])
    assert ended.returncode == 0
    assert "0 errors, 1 warnings" in ended.stderr


def test_the_rules_are_those_of_the_release_that_is_named() -> None:
    priority = {"spec.rayClusterSpec.tlsOptions": {"enabled": False}}
    assert check("--kuberay", "1.7", documents=[rayjob(priority)]).returncode == 0
    refused = check("--kuberay", "1.6", documents=[rayjob(priority)])
    assert refused.returncode == 1
    assert "was added in KubeRay 1.7" in refused.stdout


def test_a_list_as_kubectl_prints_it_is_checked_one_by_one() -> None:
    listed = {"kind": "List", "items": [rayjob({}), rayjob(BROKEN)]}
    ended = check(documents=[listed])
    assert ended.returncode == 1
    assert "2 checked" in ended.stderr


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([{"kind": "Pod"}], "holds none of RayJob, RayCluster"),
        ([], "holds none of"),
        (["a"], "holds"),
    ],
)
def test_a_file_without_ray_is_refused(documents: list[Any], message: str) -> None:
    ended = check(documents=documents)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_broken_shape_is_refused_before_anything_is_rendered() -> None:
    platform = load_platform(None)
    shape: Object = json.loads(json.dumps(platform.ray_cluster_spec))
    shape["upgradeStrategy"] = {"type": "Recreate"}
    head = shape["headGroupSpec"]["template"]["spec"]["containers"][0]
    head["ports"] = [{"name": "gcs-server", "containerPort": 6379}]
    changed = platform.model_copy(update={"ray_cluster_spec": shape})
    with pytest.raises(ConfigError, match="violates 2 rules of KubeRay") as raised:
        run_objects(load_run(ROOT / "examples/digits.yaml"), changed, "team")
    assert "no port with the name dashboard" in str(raised.value)
    assert "is not supported in a RayJob" in str(raised.value)
    assert "trainyard platform get" in str(raised.value)
