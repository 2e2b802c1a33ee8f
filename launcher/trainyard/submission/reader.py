"""A run's folder, through a pod that sees it: the run's own head, or a short-lived reader pod of the
platform, which outlives every cluster."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import re
import shutil
import tarfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from trainyard.errors import ClusterError, ClusterUnreachable, ConfigError
from trainyard.labels import OWNER_LABELS, RUN_LABEL
from trainyard.platform import Platform
from trainyard.submission.watch import HEAD_CONTAINER
from trainyard_trainer.config.trainer_config import Storage
from trainyard_trainer.run_files import names
from trainyard_trainer.run_files.exit_codes import NOT_FOUND
from trainyard_trainer.run_files.submission import is_plain_file

Object = dict[str, Any]

START_LIMIT_S = 300.0
"""For a node that has to pull the image first."""
LIFE_S = 3600
"""A reader pod that nobody deletes ends by itself."""
POLL_S = 0.5
CONTAINER = "reader"
STDOUT = 1
PIECE = 2**15
"""Bytes that are sent at once."""
AHEAD = 2**21
"""Bytes that may be under way: of these alone it is not known whether they have come."""
SILENCE_S = 60.0
"""Between two looks at a pod that says nothing."""
_NOTHING = bytes(2 * tarfile.BLOCKSIZE)
"""An archive without a file."""


class Process(Protocol):
    """A command in a container."""

    def __enter__(self) -> Process: ...
    def __exit__(self, *error: Any) -> None: ...
    @property
    def is_open(self) -> bool: ...
    def read(self, timeout_s: float) -> Iterator[tuple[int, bytes]]: ...
    def output(self) -> Iterator[tuple[int, bytes]]: ...
    def write(self, data: bytes) -> None: ...
    @property
    def exit_code(self) -> int: ...


class Pods(Protocol):
    """What is needed of a cluster."""

    def create(self, body: Object) -> Object: ...
    def get(self, kind: str, name: str) -> Object | None: ...
    def delete(self, kind: str, name: str) -> None: ...
    def execute(
        self, pod: str, container: str, command: Sequence[str], *, stdin: bool = False
    ) -> Any: ...


def storage_pod(platform: Platform, name: str, labels: Mapping[str, str], life_s: int) -> Object:
    """The platform's pod over the storage, which lives so long at most; image and command are to come."""
    pod = copy.deepcopy(platform.reader_pod)
    # Two of them must not meet.
    pod["metadata"]["name"] = f"{name}-{uuid.uuid4().hex[:8]}"
    pod["metadata"].setdefault("labels", {}).update(labels)
    # It has nothing to finish when it is deleted.
    pod["spec"] |= {"activeDeadlineSeconds": life_s, "terminationGracePeriodSeconds": 0}
    return pod


def storage_options(storage: Storage) -> list[str]:
    """How the trainer's programs are told where the folders of runs lie."""
    endpoint = ["--endpoint", storage.endpoint] if storage.endpoint else []
    return ["--path", storage.path, *endpoint]


def reader_pod(platform: Platform, run: str) -> Object:
    """The platform's reader pod, which waits for commands over a run's folder."""
    pod = storage_pod(platform, f"{run}-reader", OWNER_LABELS | {RUN_LABEL: run}, LIFE_S)
    pod["spec"]["containers"][0].update(image=platform.image, command=["sleep", str(LIFE_S)])
    return pod


class Folder:
    """The folder of a run, as a container sees it."""

    def __init__(
        self, cluster: Pods, platform: Platform, run: str, pod: str, container: str
    ) -> None:
        self.run = run
        self._cluster = cluster
        self._platform = platform
        self._pod = pod
        self._container = container

    def files(self) -> list[str]:
        """Names of all its files; none where there is no such run."""
        found = self._say()
        return [] if found is None else found.decode().splitlines()

    def sizes(self) -> dict[str, int]:
        """Bytes of each of its files; none where there is no such run."""
        lines = (self._say("--sizes") or b"").decode().splitlines()
        return {name: int(size) for size, _, name in (line.partition(" ") for line in lines)}

    def read(self, file: str) -> str | None:
        """The text of a file, or None if it is not there."""
        found: list[bytes] = []
        with self._archive(file) as archive:
            for entry in archive:
                source = archive.extractfile(entry)
                found.append(b"" if source is None else source.read())
        return found[0].decode(errors="replace") if found else None

    def records(self, file: str) -> list[Object]:
        """The records of a file with one JSON object per line, without a last line that was cut off."""
        records: list[Object] = []
        for line in (self.read(file) or "").splitlines():
            with suppress(ValueError):
                records.append(json.loads(line))
        return records

    def sum(self, file: str) -> str | None:
        """SHA-256 of a file, or None if it is not there."""
        with self._command(file, "--sum") as process:
            stream = _Stream(process)
            text = stream.read().decode().strip()
            return text if self._check(process, stream.errors) else None

    def sibling(self, run: str) -> Folder:
        """The folder of another run, through the same pod."""
        return Folder(self._cluster, self._platform, run, self._pod, self._container)

    def workers(self) -> list[Object]:
        """Where each rank of the last attempt runs, or ran."""
        text = self.read(names.WORKERS)
        workers: list[Object] = [] if text is None else json.loads(text)["workers"]
        return workers

    def logs(self) -> list[int]:
        """Numbers of the attempts whose logs are kept."""
        attempts = map(names.attempt_of_log, self.files())
        return sorted(attempt for attempt in attempts if attempt is not None)

    def delete(self) -> bool:
        """Remove it with all in it; False if it is not there."""
        return self._say("--delete") is not None

    def set_aside(self) -> str | None:
        """Begin the run anew: the name under which all that it had lies now; None if it had nothing."""
        with self._program("run_folder.set_aside", self.run) as process:
            stream = _Stream(process)
            name = stream.read().decode().strip()
            if process.exit_code != 0:
                raise ClusterError(
                    f"the folder of run {self.run} could not be set aside",
                    *stream.errors.removeprefix("error: ").strip().splitlines()[-3:],
                )
        return name or None

    def put(
        self,
        file: str,
        data: bytes,
        sha256: str,
        told: Callable[[int], object] = lambda arrived: None,
    ) -> None:
        """Write a file, whole or not at all; `told` hears how many of its bytes have come there.

        Raises ClusterError if they are not there as they were sent.
        """
        with self._program(
            "tools.folder", "--put", f"{len(data)}", sha256, self.run, file
        ) as process:
            errors = _send(process, data, told)
            if process.exit_code != 0:
                raise ClusterError(
                    f"{file} could not be written to the folder of run {self.run} in pod {self._pod}",
                    *errors.removeprefix("error: ").strip().splitlines()[-3:],
                )

    def copy(self, path: str, target: Path) -> list[Path]:
        """Copy a file, a folder or the whole to this machine, checked by its sum; what was written.

        Raises ConfigError if there is no such path, ClusterError if bytes were lost on the way.
        """
        with self._archive(path) as archive:
            written = _unpack(archive, path, target)
        if not written:
            raise ConfigError(
                f"run {self.run} has no {path or 'folder'}",
                f"`trainyard cp {self.run}:` lists its files.",
            )
        return written

    @contextmanager
    def _archive(self, path: str) -> Iterator[tarfile.TarFile]:
        """The files below a path, to be read in their order; none where there is no such path.

        Raises ClusterError if what has arrived is not what was sent.
        """
        with self._command(path, "--archive") as process:
            stream = _Stream(process)
            try:
                if stream.is_empty():
                    with tarfile.open(fileobj=io.BytesIO(_NOTHING)) as nothing:
                        yield nothing
                else:
                    with tarfile.open(fileobj=stream, mode="r|") as archive:
                        yield archive
            except (tarfile.TarError, ValueError) as error:  # a header that holds no number
                stream.finish()
                self._check(process, stream.errors)
                raise ClusterError(
                    f"the copy of {self.run}:{path} broke off", str(error), "Copy it again."
                ) from error
            stream.finish()
            if self._check(process, stream.errors) and not stream.is_whole:
                raise ClusterError(
                    f"the copy of {self.run}:{path} is not what was sent",
                    f"{stream.length:,} bytes came, of SHA-256 {stream.sum}. Copy it again.",
                )

    def _say(self, *options: str) -> bytes | None:
        """What the folder's own program says; None where there is no folder."""
        with self._command("", *options) as process:
            stream = _Stream(process)
            text = stream.read()
            return text if self._check(process, stream.errors) else None

    def _command(self, file: str, *options: str) -> Any:
        return self._program("tools.folder", *options, self.run, *([file] if file else []))

    def _program(self, module: str, *words: str) -> Any:
        command = [
            "python",
            "-m",
            f"trainyard_trainer.{module}",
            *storage_options(self._platform.storage),
            *words,
        ]
        return self._cluster.execute(self._pod, self._container, command, stdin=True)

    def _check(self, process: Process, errors: str) -> bool:
        """Whether it was there. Raises ClusterError for any other failure."""
        if process.exit_code == NOT_FOUND:
            return False
        if process.exit_code != 0:
            raise ClusterError(
                f"reading the folder of run {self.run} in pod {self._pod} failed",
                *errors.strip().splitlines()[-3:],
            )
        return True


@contextmanager
def open_folder(
    cluster: Pods,
    platform: Platform,
    run: str,
    head: str | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Folder]:
    """The run's folder, through its head where one is running, else through a reader pod."""
    if head is not None:
        yield Folder(cluster, platform, run, head, HEAD_CONTAINER)
        return
    pod = reader_pod(platform, run)
    name = pod["metadata"]["name"]
    cluster.create(pod)
    try:
        deadline = clock() + START_LIMIT_S
        while not _is_running(name, cluster.get("Pod", name)):
            if clock() > deadline:
                raise ClusterError(
                    f"reader pod {name} has not started after {START_LIMIT_S:g} s",
                    f"See `kubectl describe pod {name}`: image, storage claim, quota.",
                    reason="Timeout",
                )
            sleep(POLL_S)
        yield Folder(cluster, platform, run, name, CONTAINER)
    finally:
        cluster.delete("Pod", name)


def _is_running(name: str, pod: Object | None) -> bool:
    if pod is None:
        raise ClusterError(f"reader pod {name} was deleted by someone else", reason="NotFound")
    for container in pod.get("status", {}).get("containerStatuses", []):
        if "terminated" in container["state"]:
            ended = container["state"]["terminated"]
            raise ClusterError(
                f"reader pod {name} ended at once: {ended.get('reason')} {ended.get('message', '')}"
            )
        if "running" in container["state"]:
            return True
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a worker runs."""

    pod: str
    container: str
    ray_worker: str
    """Its id in Ray's log files."""


def worker_of(cluster: Pods, run: str, workers: list[Object], rank: int) -> Place:
    """The pod of a rank. Raises ConfigError if there is no such rank, or its pod is gone."""
    found = next((worker for worker in workers if worker["rank"] == rank), None)
    if found is None:
        raise ConfigError(
            f"run {run} has no worker of rank {rank}",
            f"Its workers are 0 to {len(workers) - 1}."
            if workers
            else "Its workers have not started yet, or it was trained by an older image.",
        )
    name = found["node"]
    pod = cluster.get("Pod", name)
    if pod is None or not (OWNER_LABELS | {RUN_LABEL: run}).items() <= _labels(pod).items():
        raise ConfigError(
            f"worker {rank} of run {run} ran in pod {name}, which is gone",
            f"What it printed is in the driver's log: `trainyard logs {run}`.",
        )
    container = pod["spec"]["containers"][0]["name"]
    return Place(pod=name, container=container, ray_worker=found["ray_worker"])


def _labels(pod: Object) -> Mapping[str, str]:
    labels: Mapping[str, str] = pod["metadata"].get("labels", {})
    return labels


class _Stream(io.RawIOBase):
    """Standard output of a command as a file, and what it says on standard error.

    A line `sha256 SUM LENGTH` there tells what the output is as a whole. When all of that has come the
    command is told so: it waits for that, since what a slow reader has not got would be lost with its end.
    """

    def __init__(self, process: Process) -> None:
        self.errors = ""
        self.length = 0
        self._process = process
        self._pieces = process.output()
        self._rest = b""
        self._sum = hashlib.sha256()
        self._is_acknowledged = False

    @property
    def sum(self) -> str:
        return self._sum.hexdigest()

    @property
    def is_whole(self) -> bool:
        """Whether all has come as it was sent."""
        return f"sha256 {self.sum} {self.length}" in self.errors.splitlines()

    def is_empty(self) -> bool:
        """Whether nothing comes at all."""
        first = self.read(1)
        self._rest = first + self._rest
        return not first

    def read(self, size: int = -1) -> bytes:
        """So many bytes, or fewer at the end."""
        pieces = [self._rest]
        length = len(self._rest)
        while size < 0 or length < size:
            found = next(self._pieces, None)
            if found is None:
                break
            channel, data = found
            if channel == STDOUT:
                self._sum.update(data)
                self.length += len(data)
                pieces.append(data)
                length += len(data)
            else:
                self.errors += data.decode(errors="replace")
            self._acknowledge()
        whole = b"".join(pieces)
        taken = whole if size < 0 else whole[:size]
        self._rest = whole[len(taken) :]
        return taken

    def finish(self) -> None:
        """Read on to the end, for the sum alone."""
        while self.read(2**20):
            pass

    def _acknowledge(self) -> None:
        if self._is_acknowledged:
            return
        lines = self.errors.splitlines(keepends=True)
        told = [int(line.split()[2]) for line in lines if re.match(r"sha256 \w+ \d+\n", line)]
        if told and self.length >= told[0]:
            self._is_acknowledged = True
            self._process.write(b"\n")


def _send(process: Process, data: bytes, told: Callable[[int], object]) -> str:
    """Send it all as fast as it arrives; what the command says on standard error until its end.

    The command says how many bytes it has, and 0 before it reads: one that cannot start is sent nothing.
    """
    sent, arrived, is_reading = 0, 0, False
    errors, said = "", b""
    while process.is_open:
        may_send = is_reading and sent < len(data) and sent - arrived < AHEAD
        if may_send:
            try:
                process.write(data[sent : sent + PIECE])
                sent += PIECE
            except ClusterUnreachable:
                sent = len(data)  # it takes no more, and may have said why
        for channel, piece in process.read(0 if may_send else SILENCE_S):
            if channel != STDOUT:
                errors += piece.decode(errors="replace")
                continue
            *numbers, said = (said + piece).split(b"\n")
            if numbers:
                is_reading, arrived = True, int(numbers[-1])
                told(arrived)
    return errors


def _unpack(archive: tarfile.TarFile, path: str, target: Path) -> list[Path]:
    """Write the files of an archive below the target; a single file into it, or under its name.

    What sends it runs the run's image, which is whose the run's is: it is not believed. Raises ClusterError
    for links, devices, files with holes, and paths that lead away, before anything of them is written, and
    ConfigError for what this machine refuses to write.
    """
    written = []
    for entry in archive:
        if "\0" in entry.name or not is_plain_file(entry):
            raise ClusterError(f"the archive of {path} holds {entry.name!r}, which no run has")
        free = shutil.disk_usage(_existing(target)).free
        if entry.size > free:
            raise ClusterError(
                f"{entry.name} has {entry.size:,} bytes, and {target} has room for {free:,}",
                "Make room, or copy to another disk.",
            )
        is_the_file = entry.name == PurePosixPath(path).name
        file = target if is_the_file and not target.is_dir() else target / entry.name
        source = archive.extractfile(entry)
        assert source is not None  # it is a file
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as output:
                shutil.copyfileobj(source, output, 2**20)
        except (OSError, UnicodeEncodeError) as error:
            raise ConfigError(f"{file} cannot be written: {error}") from error
        written.append(file)
    return written


def _existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())
