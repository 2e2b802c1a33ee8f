"""The record of a run's attempts in run.json and summary.json."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from training import small_config

from trainyard_trainer.checkpointing.resume import check_identity
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.hardware import GpuFacts, driver_version
from trainyard_trainer.run_files.record_text import (
    FIELD_NAMES,
    HEADINGS,
    attempt_row,
    node_rows,
)
from trainyard_trainer.run_files.submission import SOURCE_VARIABLE, VARIABLE
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.ownership.lease import Lease
from trainyard_trainer.run_folder.run_record import (
    AttemptRecord,
    NodeFacts,
    RunRecord,
    digests_of,
    merged,
)

DIGEST = f"sha256:{'1' * 64}"
GIT = {"revision": "4" * 40, "is_dirty": True}
SUBMITTED = {
    VARIABLE: json.dumps({"launch": {"image": "trainyard:1"}}),
    SOURCE_VARIABLE: json.dumps(GIT),
}


def config_of(storage: Path, **changes: Any) -> TrainerConfig:
    return small_config(storage, scaling__num_workers=2, scaling__cpus_per_worker=3, **changes)


def folder_of(config: TrainerConfig) -> RunFolder:
    return RunFolder.open(config.storage.path, config.name)


def recorded(folder: RunFolder) -> list[dict[str, Any]]:
    record: list[dict[str, Any]] = json.loads(folder.read(folder.run))["record"]
    return record


def worker(rank: int, node: str, gpu: str | None = None) -> dict[str, Any]:
    return {
        "rank": rank,
        "node": node,
        "process": 1,
        "ray_worker": "w",
        "ray_node": f"id-{node}",
        "gpu": {"model": "H100", "id": gpu} if gpu else None,
        "gpu_driver": "550.54.15" if gpu else None,
    }


def write_workers(folder: RunFolder, attempt: int, *workers: dict[str, Any]) -> None:
    folder.write(folder.workers, json.dumps({"attempt": attempt, "workers": workers}))


def test_an_attempt_tells_with_what_where_and_how_long_it_ran(tmp_path: Path) -> None:
    config = config_of(tmp_path, scaling__use_gpu=True)
    folder = folder_of(config)
    with Lease.acquire(folder, print) as lease:
        record = RunRecord(folder, config, lease, environment=SUBMITTED)
        record.begin()
        assert recorded(folder)[0]["ended"] is None
        write_workers(folder, 1, worker(0, "pod-a", "GPU-1"), worker(1, "pod-a", "GPU-2"))
        folder.write(f"{folder.root}/images.json", json.dumps({"pod-a": DIGEST, "other": "x"}))
        record.attempt.counted_until -= 3600
        in_summary = record.end()
    (attempt,) = recorded(folder)
    assert json.loads(json.dumps(in_summary)) == {"record": [attempt]}
    assert (attempt["attempt"], attempt["image"], attempt["git"]) == (1, "trainyard:1", GIT)
    assert attempt["image_digests"] == [DIGEST]
    gpus = [{"model": "H100", "id": f"GPU-{number}"} for number in (1, 2)]
    assert attempt["nodes"] == [
        {"name": "pod-a", "id": "id-pod-a", "gpus": gpus, "gpu_driver": "550.54.15"}
    ]
    assert {"python", "torch", "ray"} <= attempt["versions"].keys()
    assert attempt["gpu_hours"] == pytest.approx(2, abs=0.01)
    assert attempt["cpu_hours"] == pytest.approx(6, abs=0.01)
    assert attempt["began"] <= attempt["ended"]


def test_on_a_laptop_there_is_no_image_no_gpu_and_perhaps_no_git(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    folder = folder_of(config)
    with Lease.acquire(folder, print) as lease:
        record = RunRecord(folder, config, lease, environment={})
        record.begin()
        write_workers(folder, 1, worker(0, "laptop"))
        record.end()
    (attempt,) = recorded(folder)
    assert (attempt["image"], attempt["image_digests"], attempt["git"]) == (None, [], None)
    assert (attempt["gpus"], attempt["gpu_hours"]) == (0, 0)
    assert attempt["nodes"][0]["gpus"] == []


def test_an_attempt_that_was_killed_ended_with_its_last_heartbeat(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    folder = folder_of(config)
    with Lease.acquire(folder, print) as lease, closing(folder_record(folder, config, lease)):
        killed = recorded(folder)
    killed[0]["counted_until"] -= 7200
    folder.write(folder.run, json.dumps({"record": killed}))
    folder.write(f"{folder.root}/lease/a1.beat", "")
    with Lease.acquire(folder, print) as lease, closing(folder_record(folder, config, lease)):
        first, second = recorded(folder)
    assert first["ended"] is not None
    assert first["cpu_hours"] == pytest.approx(12, abs=0.05)
    assert (second["attempt"], second["ended"]) == (2, None)


class Begun:
    """A record that has begun, and whose driver is killed at the end of a block."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        record.begin()

    def close(self) -> None:
        self.record.stop()


def folder_record(folder: RunFolder, config: TrainerConfig, lease: Lease) -> Begun:
    return Begun(RunRecord(folder, config, lease, environment={}))


def test_the_workers_of_an_earlier_attempt_are_not_those_of_this_one(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    folder = folder_of(config)
    write_workers(folder, 7, worker(0, "pod-old"))
    with Lease.acquire(folder, print) as lease:
        record = RunRecord(folder, config, lease, environment={})
        record.begin()
        record.end()
    assert recorded(folder)[0]["nodes"] == []


def test_the_record_does_not_belong_to_the_identity_of_the_run(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    folder = folder_of(config)
    with Lease.acquire(folder, print) as lease, closing(folder_record(folder, config, lease)):
        check_identity(folder, config)


def test_a_node_is_named_once_with_all_gpus_of_all_worker_groups() -> None:
    one, other = (GpuFacts(model="H100", id=f"GPU-{number}") for number in (1, 2))
    first = NodeFacts(name="a", id="1", gpus=(one,), gpu_driver="550")
    again, replaced = NodeFacts(name="a", id="1", gpus=(one, other)), NodeFacts(name="b", id="2")
    assert merged([first], [again, replaced]) == [
        NodeFacts(name="a", id="1", gpus=(one, other), gpu_driver="550"),
        replaced,
    ]


def test_a_digest_in_the_reference_needs_no_launcher() -> None:
    attempt = {"image": f"repo/trainyard@{DIGEST}", "nodes": [], "image_digests": []}
    assert digests_of(attempt, {}) == [DIGEST]


def test_the_record_is_shown_as_a_row_for_each_attempt_and_for_each_gpu() -> None:
    gpus = [{"model": "H100", "id": "GPU-1"}, {"model": "H100", "id": "GPU-2"}]
    nodes = [
        {"name": "a", "id": "1", "gpus": gpus, "gpu_driver": "550.54.15"},
        {"name": "b", "id": None, "gpus": [], "gpu_driver": None},
    ]
    attempt = {
        "attempt": 1,
        "began": "2026-01-01T00:00:00+00:00",
        "ended": None,
        "nodes": nodes,
        "gpu_hours": 2.5,
        "cpu_hours": 20.0,
        "image": "trainyard:1",
        "image_digests": [DIGEST],
        "git": GIT,
        "code_sha256": None,
    }
    assert attempt_row(attempt) == (
        *("1", "2026-01-01 00:00:00", "-", "a, b", "2 x H100", "2.5", "20"),
        *("trainyard:1 (111111111111)", "444444444444, dirty", "-"),
    )
    assert node_rows([attempt]) == [
        ("1", "a", "1", "H100", "GPU-1", "550.54.15"),
        ("1", "a", "1", "H100", "GPU-2", "550.54.15"),
        ("1", "b", "-", "-", "-", "-"),
    ]
    assert len(attempt_row(attempt)) == len(HEADINGS)


def test_fields_have_readable_names_with_units() -> None:
    known = {field.name for one in (AttemptRecord, NodeFacts) for field in fields(one)}
    assert FIELD_NAMES.keys() <= known
    assert not [name for name in (*HEADINGS, *FIELD_NAMES.values()) if "_" in name]
    assert {"GPUs", "GPU-hours", "CPU-hours", "began (UTC)", "ended (UTC)"} <= {*HEADINGS}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\nGCC: 12\n",
            "550.54.15",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
            "580.65.06",
        ),
        ("something else\n", None),
        (None, None),
    ],
)
def test_the_driver_version_is_that_of_the_kernel_module(
    tmp_path: Path, text: str | None, version: str | None
) -> None:
    file = tmp_path / "version"
    if text is not None:
        file.write_text(text)
    assert driver_version(file) == version
