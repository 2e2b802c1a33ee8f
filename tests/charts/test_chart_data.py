"""Named data volumes: published for runs, mounted by the standing RayCluster, and by no other pod."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.charts.helm_chart import platform_of, pods_of, refusal, render
from tests.charts.kubernetes_versions import VERSIONS, as_objects, is_known, problems
from tests.charts.test_chart_pods import EVERYTHING, job_of, unrestricted
from trainyard.rules.check import check

VOLUMES: dict[str, Any] = {
    "imagenet": {"claim": "imagenet-ro", "mountPath": "/data/imagenet"},
    "scratch": {
        "csi": {"driver": "lustre.example.com", "volumeAttributes": {"share": "scratch"}},
        "mountPath": "/scratch",
        "readOnly": False,
    },
}
PUBLISHED = [
    {
        "name": "imagenet",
        "volume": {
            "name": "data-imagenet",
            "persistentVolumeClaim": {"claimName": "imagenet-ro", "readOnly": True},
        },
        "mount": {"name": "data-imagenet", "mountPath": "/data/imagenet", "readOnly": True},
    },
    {
        "name": "scratch",
        "volume": {"name": "data-scratch", "csi": VOLUMES["scratch"]["csi"]},
        "mount": {"name": "data-scratch", "mountPath": "/scratch", "readOnly": False},
    },
]


def values(**volumes: Any) -> dict[str, Any]:
    return {"data": {"volumes": volumes}}


def test_data_volumes_are_published_and_mounted_by_the_standing_cluster_alone() -> None:
    objects = render({**EVERYTHING, **values(**VOLUMES)})
    assert platform_of(objects)["dataVolumes"] == PUBLISHED
    for place, pod in pods_of(objects).items():
        spec = pod["spec"]
        volumes = [one for one in spec.get("volumes", []) if one["name"].startswith("data-")]
        mounts = [
            one
            for container in spec["containers"]
            for one in container.get("volumeMounts", [])
            if one["name"].startswith("data-")
        ]
        is_standing = place.startswith("standing")
        assert volumes == ([one["volume"] for one in PUBLISHED] if is_standing else []), place
        assert mounts == ([one["mount"] for one in PUBLISHED] if is_standing else []), place


def test_a_platform_without_data_volumes_publishes_none() -> None:
    assert "dataVolumes" not in platform_of(render({}))


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_with_data_volumes_are_valid_for(version: str) -> None:
    objects = render({**EVERYTHING, **values(**VOLUMES)})
    own = [one for one in [*objects, *as_objects(pods_of(objects))] if is_known(one)]
    assert [problem for one in own for problem in problems(one, version)] == []


@pytest.mark.parametrize(
    "volume",
    [
        {"claim": "a"},
        {"claim": "a", "mountPath": "data"},
        {"claim": "a", "mountPath": "/data", "readonly": True},
        {"emptyDirs": {}, "mountPath": "/data"},
        {"claim": "A", "mountPath": "/data"},
    ],
)
def test_the_keys_of_a_data_volume_are_closed(volume: dict[str, Any]) -> None:
    assert "/data/volumes/imagenet" in refusal(values(imagenet=volume))


def test_a_field_that_a_volume_source_does_not_have_is_found_in_the_run_s_rayjob() -> None:
    volume = {"nfs": {"server": "a", "pathh": "/x"}, "mountPath": "/data"}
    job = job_of(render(values(a=volume)), settings=["volumes=[a]"], workers="2")
    errors = {one.path for one in check(job, "1.6", "2.60.0") if one.severity == "error"}
    assert any(path.endswith("volumes[3].nfs.pathh") for path in errors), errors


def test_notes_name_the_data_volume_that_leaves_restricted(tmp_path: Path) -> None:
    volume = {"nfs": {"server": "a", "path": "/x"}, "mountPath": "/data"}
    assert unrestricted(values(a=volume), tmp_path) == [
        "runs with the data volume a: volumes.data-a.nfs"
    ]
    assert unrestricted(values(**VOLUMES), tmp_path) == []
