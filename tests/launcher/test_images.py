"""The digests of the images of a run's pods, which a launcher that watches records in the run's folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import FakeCluster, LocalProcess

from trainyard.errors import ClusterError
from trainyard.platform import Platform
from trainyard.submission.images import digests_of, recording_images
from trainyard.submission.run_folder.remote_folder import RemoteFolder
from trainyard.submission.status import RunStatus
from trainyard_trainer.run_files.programs.isolation import IN_PODS

DIGEST = f"sha256:{'1' * 64}"


def pod(name: str, image_id: str, container: str = "ray-head") -> dict[str, Any]:
    labels = {"app.kubernetes.io/managed-by": "trainyard", "trainyard.io/run": "digits"}
    statuses = [{"name": container, "imageID": image_id}]
    return {
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "status": {"containerStatuses": statuses},
    }


@pytest.mark.parametrize(
    ("image_id", "container", "digest"),
    [
        (f"registry.example/team/trainyard@{DIGEST}", "ray-head", {"a": DIGEST}),
        (f"docker-pullable://trainyard@{DIGEST}", "ray-worker", {"a": DIGEST}),
        (DIGEST, "ray-worker", {"a": DIGEST}),
        ("", "ray-worker", {}),
        (f"mesh/proxy@{DIGEST}", "istio-proxy", {}),
    ],
)
def test_a_digest_is_that_of_the_container_with_ray(
    image_id: str, container: str, digest: dict[str, str]
) -> None:
    assert digests_of([pod("a", image_id, container)]) == digest


def statuses(*attempts: int) -> list[RunStatus]:
    return [
        RunStatus(submission="digits-1", phase="running", attempts=number, progress={"step": 1})
        for number in attempts
    ]


class Here(FakeCluster):
    """A cluster whose pods see a folder of this machine."""

    def execute(self, *arguments: Any, **options: Any) -> Any:
        command = arguments[2]
        assert tuple(command[: len(IN_PODS)]) == tuple(IN_PODS)
        return LocalProcess([sys.executable, "-m", *command[len(IN_PODS) :]])


def test_the_digests_of_each_attempt_are_recorded_once(platform: Platform, tmp_path: Path) -> None:
    storage = platform.storage.model_copy(update={"path": str(tmp_path)})
    platform = platform.model_copy(update={"storage": storage})
    (tmp_path / "digits").mkdir()
    cluster, opened = Here(), []

    def open_folder() -> Any:
        from contextlib import nullcontext

        opened.append(1)
        return nullcontext(RemoteFolder(cluster, platform, "digits", "pod", "c"))

    shown = []
    cluster.objects["Pod", "a"] = pod("a", f"x@{DIGEST}")
    for status in recording_images(cluster, "digits", statuses(1, 1, 2), open_folder):
        shown.append(status.attempts)
        cluster.objects["Pod", "b"] = pod("b", f"x@{DIGEST}")
    assert shown == [1, 1, 2]
    assert len(opened) == 2
    assert json.loads((tmp_path / "digits/images.json").read_text()) == {"a": DIGEST, "b": DIGEST}


def test_a_watch_goes_on_where_the_digests_cannot_be_recorded() -> None:
    def refuse() -> Any:
        raise ClusterError("exec is forbidden", reason="Forbidden")

    said: list[str] = []
    watched = recording_images(FakeCluster(), "digits", statuses(1, 1), refuse, said.append)
    assert len(list(watched)) == 2
    (line,) = said
    assert "exec is forbidden" in line
