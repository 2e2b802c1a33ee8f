"""The record of a run: with what, where and for how long each attempt ran.

It is the key `record` of run.json and of summary.json, a list with one `AttemptRecord` for each attempt. It
does not belong to the run's identity: another image, revision or node trains the same run.

The driver knows most facts itself. Those of the workers' machines are in workers.json, which rank 0 of each
worker group writes. No pod can read the digest of its own image: a launcher that watches the run writes it
to images.json.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from pyarrow import fs

from trainyard_trainer.config.scaling import Scaling
from trainyard_trainer.config.trainer_config import AttemptConfig
from trainyard_trainer.errors import StorageError
from trainyard_trainer.hardware import GpuFacts, driver_version
from trainyard_trainer.run_files import names, submission
from trainyard_trainer.run_files.lease import heartbeat_file
from trainyard_trainer.run_files.names import RECORD
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.ownership.lease import Lease
from trainyard_trainer.versions import LIBRARIES, NETWORKS, versions

POLL_S = 10.0
"""Seconds between two looks for a new worker group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """A node of Ray, which is a pod on Kubernetes."""

    name: str
    """The name of the pod or of the machine."""
    id: str | None
    """Ray's id of the node; None without Ray."""
    gpus: tuple[GpuFacts, ...] = ()
    """The GPUs that the run has used there."""
    gpu_driver: str | None = None
    """The version of the NVIDIA driver, if it is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """Where a worker runs: an entry of workers.json."""

    rank: int
    node: str
    """The name of its node."""
    process: int
    """The id of its process there."""
    ray_worker: str
    """Ray's id of the process, which its files in Ray's own logs have in their names; empty without Ray."""
    ray_node: str
    """Ray's id of its node; empty without Ray."""
    gpu: GpuFacts | None
    gpu_driver: str | None

    @classmethod
    def here(
        cls, rank: int, *, ray_worker: str, ray_node: str, gpu: GpuFacts | None
    ) -> WorkerFacts:
        """Return the facts of the worker that is this process."""
        return cls(
            rank=rank,
            node=os.environ.get("RAY_CLOUD_INSTANCE_ID") or socket.gethostname(),
            process=os.getpid(),
            ray_worker=ray_worker,
            ray_node=ray_node,
            gpu=gpu,
            gpu_driver=driver_version() if gpu else None,
        )


@dataclass(kw_only=True, slots=True)
class AttemptRecord:
    """With what, where and for how long one attempt ran."""

    attempt: int
    began: str
    """When the attempt began, as ISO 8601 in UTC."""
    ended: str | None
    """When it ended; of an attempt that was killed, its last sign of life. None while it runs."""
    image: str | None
    """The image that was submitted; None if the run was not submitted to a cluster."""
    image_digests: list[str]
    """The digests to which the nodes resolved it; empty while no launcher has looked."""
    code_sha256: str | None
    """The SHA-256 of the archive of the user's code; None without such code."""
    git: dict[str, Any] | None
    """`revision` and `is_dirty` of the folder of the code or of the run file; None if not known."""
    nodes: list[NodeFacts]
    """The nodes on which its workers ran, of all its worker groups."""
    versions: dict[str, str]
    """The versions of Python and of the installed libraries."""
    gpus: int
    """The GPUs that the workers hold now."""
    cpus: int
    """The CPUs that the workers hold now."""
    gpu_hours: float = 0.0
    """Hours from the beginning to `counted_until`, times the GPUs that the workers held."""
    cpu_hours: float = 0.0
    """The same for the CPUs of the workers."""
    counted_until: float = 0.0
    """The time, in seconds since 1970, up to which the hours are counted."""


class RunRecord:
    """Writes the record of the attempt that holds the lease. The driver has one."""

    def __init__(
        self,
        folder: RunFolder,
        config: AttemptConfig,
        lease: Lease,
        *,
        packages: Iterable[str] = NETWORKS,
        code_sha256: str | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._folder = folder
        self._config = config
        self._lease = lease
        self._earlier: list[dict[str, Any]] = []
        self._workers_file: tuple[int, object] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="run-record", daemon=True)
        now = time.time()
        submitted = json.loads(environment.get(submission.VARIABLE, "{}"))
        self.attempt = AttemptRecord(
            attempt=lease.attempt,
            began=iso(now),
            ended=None,
            image=submitted.get("launch", {}).get("image"),
            image_digests=[],
            code_sha256=code_sha256,
            git=json.loads(environment.get(submission.SOURCE_VARIABLE, "null")),
            nodes=[],
            versions=versions((*packages, *LIBRARIES)),
            counted_until=now,
            **held(config.scaling, config.scaling.num_workers),
        )

    @property
    def has_begun(self) -> bool:
        return self._thread.ident is not None

    def begin(self) -> None:
        """Write run.json: the config and the record, in which an attempt that was killed has ended now."""
        if self._folder.exists(self._folder.run):
            before = json.loads(self._folder.read(self._folder.run)).get(RECORD, [])
            self._earlier = [closed(each, self._folder) for each in before]
        self._write()
        self._thread.start()

    def add_nodes(self, nodes: Iterable[NodeFacts]) -> None:
        """Record nodes on which workers run."""
        with self._lock:
            self.attempt.nodes = merged(self.attempt.nodes, nodes)
            self._write()

    def end(self) -> dict[str, Any]:
        """Record the end of the attempt in run.json; return what summary.json has of the record.

        Without `begin` there is nothing to record.
        """
        if not self.has_begun:
            return {}
        self.stop()
        self._read_workers()
        with self._lock:
            self._count(time.time())
            self.attempt.ended = iso(self.attempt.counted_until)
            return {RECORD: self._write()}

    def stop(self) -> None:
        """End the thread. Nothing is written."""
        self._stop.set()
        if self.has_begun:
            self._thread.join()

    def _poll(self) -> None:
        while not self._stop.wait(POLL_S):
            if self._lease.is_fenced:
                return
            with suppress(StorageError):  # the next look will tell
                self._read_workers()

    def _read_workers(self) -> None:
        """Take the facts of a worker group that has begun since the last look."""
        info = self._folder.infos([self._folder.workers])[0]
        change = (info.size, info.mtime)
        if info.type != fs.FileType.File or change == self._workers_file:
            return
        try:
            found = json.loads(self._folder.read(self._folder.workers))
        except ValueError:  # a bucket gave the beginning of one object and the end of the next
            return
        self._workers_file = change
        if found["attempt"] != self.attempt.attempt:
            return
        with self._lock:
            self._count(time.time())
            workers = found["workers"]
            now = held(self._config.scaling, len(workers))
            self.attempt.gpus, self.attempt.cpus = now["gpus"], now["cpus"]
            self.attempt.nodes = merged(self.attempt.nodes, nodes_of(workers))
            self._write()

    def _count(self, until: float) -> None:
        """Add the time since the last count to the hours."""
        hours = max(until - self.attempt.counted_until, 0.0) / 3600
        self.attempt.gpu_hours += hours * self.attempt.gpus
        self.attempt.cpu_hours += hours * self.attempt.cpus
        self.attempt.counted_until = until

    def _write(self) -> list[dict[str, Any]]:
        """Write run.json; return the record of all attempts."""
        own = rounded(asdict(self.attempt))
        images = read_images(self._folder)
        record = [
            each | {"image_digests": digests_of(each, images)} for each in (*self._earlier, own)
        ]
        document = self._config.model_dump(mode="json") | {RECORD: record}
        self._folder.write(self._folder.run, json.dumps(document, indent=2))
        return record


def held(scaling: Scaling, workers: int) -> dict[str, int]:
    """Return the GPUs and CPUs that so many workers hold."""
    return {
        "gpus": workers if scaling.use_gpu else 0,
        "cpus": workers * scaling.cpus_per_worker,
    }


def closed(attempt: dict[str, Any], folder: RunFolder) -> dict[str, Any]:
    """Return the record of an earlier attempt; one that was killed ended with its last sign of life."""
    if attempt["ended"] is not None:
        return attempt
    heartbeat = folder.infos([f"{folder.root}/{heartbeat_file(attempt['attempt'])}"])[0]
    counted = attempt["counted_until"]
    ended = heartbeat.mtime.timestamp() if heartbeat.type == fs.FileType.File else counted
    hours = max(ended - counted, 0.0) / 3600
    return rounded(
        attempt
        | {
            "ended": iso(max(ended, counted)),
            "gpu_hours": attempt["gpu_hours"] + hours * attempt["gpus"],
            "cpu_hours": attempt["cpu_hours"] + hours * attempt["cpus"],
            "counted_until": max(ended, counted),
        }
    )


def rounded(attempt: dict[str, Any]) -> dict[str, Any]:
    """Return the record of an attempt with hours and times in as many digits as mean anything."""
    digits = {"gpu_hours": 6, "cpu_hours": 6, "counted_until": 3}
    return attempt | {name: round(attempt[name], count) for name, count in digits.items()}


def without_record(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary as the driver prints it: the record may name hundreds of nodes."""
    return {key: value for key, value in summary.items() if key != RECORD}


def nodes_of(workers: Iterable[Mapping[str, Any]]) -> list[NodeFacts]:
    """Return the nodes of the workers of workers.json."""
    return merged(
        (),
        (
            NodeFacts(
                name=worker["node"],
                id=worker["ray_node"] or None,
                gpus=(GpuFacts(**worker["gpu"]),) if worker["gpu"] else (),
                gpu_driver=worker["gpu_driver"],
            )
            for worker in workers
        ),
    )


def merged(known: Iterable[NodeFacts], more: Iterable[NodeFacts]) -> list[NodeFacts]:
    """Return each node once, in the order in which they were first seen, with all its GPUs."""
    nodes: dict[tuple[str, str | None], NodeFacts] = {}
    for node in (*known, *more):
        before = nodes.get((node.name, node.id), NodeFacts(name=node.name, id=node.id))
        nodes[node.name, node.id] = NodeFacts(
            name=node.name,
            id=node.id,
            gpus=_merged_gpus(before.gpus, node.gpus),
            gpu_driver=node.gpu_driver or before.gpu_driver,
        )
    return list(nodes.values())


def _merged_gpus(known: tuple[GpuFacts, ...], more: tuple[GpuFacts, ...]) -> tuple[GpuFacts, ...]:
    """Return each GPU once; those without an id are the same ones each time."""
    named = dict.fromkeys(gpu for gpu in (*known, *more) if gpu.id is not None)
    nameless = ([gpu for gpu in side if gpu.id is None] for side in (known, more))
    return (*named, *max(nameless, key=len))


def read_images(folder: RunFolder) -> dict[str, str]:
    """Return the digest of each pod's image, as a launcher has written it to images.json."""
    try:
        images: dict[str, str] = json.loads(folder.read(f"{folder.root}/{names.IMAGES}"))
    except (FileNotFoundError, ValueError):
        return {}
    return images


def digests_of(attempt: Mapping[str, Any], images: Mapping[str, str]) -> list[str]:
    """Return the digests of an attempt's image: that of its reference, else those of its pods."""
    named = (attempt["image"] or "").partition("@")[2]
    found = [images[node["name"]] for node in attempt["nodes"] if node["name"] in images]
    return [named] if named else sorted({*attempt["image_digests"], *found})


def iso(seconds: float) -> str:
    """Return a time as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")
