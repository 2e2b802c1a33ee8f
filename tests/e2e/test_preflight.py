"""Preflight on a real cluster: a pod tests what a run needs, and defects are reported."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Ended, Object, Team, get, kubectl

RUN = ("examples/digits.yaml", "--workers", "1")


@pytest.fixture(scope="module")
def team(make_team: Callable[[str], Team], tmp_path_factory: pytest.TempPathFactory) -> Team:
    team = make_team("preflight")
    team.install(tmp_path_factory.mktemp("values"))
    return team


def preflight(team: Team, *arguments: str, **environment: str) -> tuple[dict[str, Object], Ended]:
    """Run preflight and return its checks by name."""
    ended = team.trainyard("preflight", *arguments, "--json", **environment)
    return {check["name"]: check for check in json.loads(ended.stdout)}, ended


def states(found: dict[str, Object]) -> dict[str, str]:
    return {name: check["state"] for name, check in found.items()}


def test_a_cluster_that_can_is_ok_in_all_checks_and_clean_afterwards(team: Team) -> None:
    found, ended = preflight(team, *RUN)
    assert states(found) == dict.fromkeys(found, "ok"), found
    assert len(found) == 15
    assert ended.returncode == 0
    assert "2.60.0 in the image" in found["Ray version"]["seen"]
    assert "write, read, list, delete" in found["storage"]["seen"]
    left = [*get("pods", team.namespace)["items"], *team.rayjobs()]
    names = [one["metadata"]["name"] for one in left if "deletionTimestamp" not in one["metadata"]]
    assert [name for name in names if "preflight" in name] == []


def test_the_table_has_a_remedy_for_what_failed(team: Team) -> None:
    ended = team.trainyard("preflight", *RUN, "--set", "image=127.0.0.1:5000/trainyard:none")
    assert ended.returncode == 1
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("image")]
    assert "failed" in line
    assert "make image push IMAGE=127.0.0.1:5000/trainyard:none" in line


def privileged(platform: Object) -> None:
    platform["readerPod"]["spec"]["containers"][0]["securityContext"] = {"privileged": True}


def other_ray(platform: Object) -> None:
    platform["rayVersion"] = platform["rayClusterSpec"]["rayVersion"] = "2.59.0"


def read_only(platform: Object) -> None:
    platform["storage"]["path"] = "/nowhere"


def other_claim(platform: Object) -> None:
    for volume in platform["readerPod"]["spec"]["volumes"]:
        if "persistentVolumeClaim" in volume:
            volume["persistentVolumeClaim"]["claimName"] = "no-such-claim"


@pytest.mark.parametrize(
    ("change", "check", "seen"),
    [
        (privileged, "Pod Security", "violates PodSecurity"),
        (other_ray, "Ray version", "2.60.0 in the image, 2.59.0 in the platform"),
        (read_only, "storage", "Read-only file system"),
        (other_claim, "claim", "no-such-claim"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_broken_fails_in_its_check_alone(
    team: Team, tmp_path: Path, change: Callable[[Object], None], check: str, seen: str
) -> None:
    platform = yaml.safe_load(team.trainyard("platform", "get").stdout)
    change(platform)
    file = tmp_path / "platform.yaml"
    file.write_text(yaml.safe_dump(platform))
    found, ended = preflight(team, "--platform", str(file))
    failed = [name for name, state in states(found).items() if state == "failed"]
    assert failed == [check], found
    assert seen in found[check]["seen"]
    assert found[check]["remedy"]
    assert ended.returncode == 1


def test_more_than_the_cluster_can_ever_hold_fails_before_a_pod_waits_for_it(team: Team) -> None:
    found, _ = preflight(team, "examples/digits.yaml", "--gpus", "2")
    assert found["nodes"]["state"] == "failed"


def test_a_namespace_without_the_platform_is_told_apart(make_team: Callable[[str], Team]) -> None:
    found, ended = preflight(make_team("bare"))
    assert found["platform"]["state"] == "failed"
    assert found["image"]["state"] == "not known"
    assert ended.returncode == 1


def kubeconfig_of(team: Team, folder: Path) -> Path:
    """Return the kubeconfig of an account without any rights in the namespace."""
    config: Any = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    token = kubectl("create", "token", "default", "-n", team.namespace).strip()
    config["users"][0]["user"] = {"token": token}
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return file


def test_missing_rights_are_listed_and_nothing_is_claimed_beyond(
    team: Team, tmp_path: Path
) -> None:
    found, ended = preflight(team, KUBECONFIG=str(kubeconfig_of(team, tmp_path)))
    assert found["rights"]["state"] == "failed"
    assert "create RayJob" in found["rights"]["seen"]
    assert found["nodes"]["state"] == "not known"
    assert ended.returncode == 1
