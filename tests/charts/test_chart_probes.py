"""What `helm test` starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.charts.helm_chart import (
    S3_STORAGE,
    Object,
    environment,
    of_kind,
    only,
    platform_of,
    pods_of,
    render,
)

TRAINER = Path(__file__).resolve().parents[2] / "train_image"


def storage_probe(objects: list[Object]) -> Object:
    return of_kind(objects, "Pod")["trainyard-probe-storage"]


def run_probe(pod: Object, path: str) -> subprocess.CompletedProcess[str]:
    """The probe's own program, in this machine's Python and on this machine's disk."""
    (container,) = pod["spec"]["containers"]
    assert container["command"][0] == "python"
    assert container["args"] == ["--path=/mnt/trainyard"]
    return subprocess.run(
        [sys.executable, *container["command"][1:], f"--path={path}"],
        cwd=TRAINER,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_storage_probe_leaves_nothing_behind(on_claim, tmp_path):
    ended = run_probe(storage_probe(on_claim), str(tmp_path))
    assert '"delete": "ok"' in ended.stdout, ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_storage_probe_fails_where_nothing_can_be_written(on_claim, tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert run_probe(storage_probe(on_claim), str(file)).returncode == 1


@pytest.mark.parametrize(
    ("storage", "arguments"),
    [
        ({}, ["--path=/mnt/trainyard"]),
        (S3_STORAGE, ["--path=s3://models/vision", "--endpoint=http://minio:9000"]),
        ({"claim": None, "s3": {"path": "s3://models"}}, ["--path=s3://models"]),
    ],
)
def test_the_storage_probe_is_told_where_runs_lie(storage, arguments):
    pod = storage_probe(render({"storage": storage}))
    assert pod["spec"]["containers"][0]["args"] == arguments


def test_the_storage_probe_is_as_the_pods_of_runs_are(objects):
    """Same image, identity, volumes and way to the storage: else it would prove nothing."""
    probe, head = storage_probe(objects), pods_of(objects)["platform head"]
    for key in ("serviceAccountName", "securityContext", "volumes", "automountServiceAccountToken"):
        assert probe["spec"][key] == head["spec"][key]
    assert probe["spec"]["containers"][0]["image"] == platform_of(objects)["image"]
    for key in ("securityContext", "volumeMounts"):
        assert probe["spec"]["containers"][0][key] == head["spec"]["containers"][0][key]
    assert environment(probe).items() <= environment(head).items()
    assert head["metadata"]["labels"].items() <= probe["metadata"]["labels"].items()
    assert probe["metadata"]["annotations"]["helm.sh/hook"] == "test"


def test_gpus_are_probed_only_on_request_and_where_there_are_some():
    assert list(of_kind(render({}), "Pod")) == ["trainyard-probe-storage"]
    slices = {"gpusPerNode": 7, "gpuResource": "nvidia.com/mig-1g.5gb", "cpus": 8, "memoryGib": 8}
    objects = render({"test": {"gpus": True}, "pools": {"slices": slices}})
    probes = of_kind(objects, "Pod")
    assert sorted(probes) == [
        "trainyard-probe-gpu", "trainyard-probe-slices", "trainyard-probe-storage",
    ]  # fmt: skip
    limits = probes["trainyard-probe-slices"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/mig-1g.5gb"] == "1"
    tolerations = probes["trainyard-probe-gpu"]["spec"]["tolerations"]
    assert tolerations == pods_of(objects)["platform gpu"]["spec"]["tolerations"]


@pytest.mark.ci
def test_a_gpu_probe_ends_badly_without_cuda():
    pod = of_kind(render({"test": {"gpus": True}}), "Pod")["trainyard-probe-gpu"]
    (container,) = pod["spec"]["containers"]
    ended = subprocess.run(
        [sys.executable, "-c", *container["args"]],
        env={"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode != 0
    assert "CUDA" in ended.stderr or "NVIDIA" in ended.stderr


def test_the_claims_probe_mounts_the_claim(on_claim):
    claim = only(on_claim, "PersistentVolumeClaim")["metadata"]["name"]
    volumes = storage_probe(on_claim)["spec"]["volumes"]
    assert {"name": "storage", "persistentVolumeClaim": {"claimName": claim}} in volumes
