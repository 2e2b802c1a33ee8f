"""A run's folder on the cluster's storage, read and written by commands in a pod that mounts the storage."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from trainyard.errors import ClusterError, ConfigError
from trainyard.platform import Platform
from trainyard.submission.run_folder.transfer import OutputStream, RemoteCommand, send, unpack
from trainyard_trainer.config.storage import Storage
from trainyard_trainer.run_files import names
from trainyard_trainer.run_files.driver_output import ERROR
from trainyard_trainer.run_files.exit_codes import NOT_FOUND
from trainyard_trainer.run_files.programs.isolation import IN_PODS

Object = dict[str, Any]

ERROR_LINES = 3
"""How many lines from the end of a failed command's standard error an error message quotes."""

_EMPTY_ARCHIVE = bytes(2 * tarfile.BLOCKSIZE)
"""The bytes of a tar archive without a file."""


class PodAccess(Protocol):
    """The methods of `Cluster` with which pods are created and commands are executed in them."""

    @property
    def options(self) -> str: ...
    def create(self, body: Object) -> Object: ...
    def get(self, kind: str, name: str) -> Object | None: ...
    def delete(self, kind: str, name: str) -> None: ...
    def execute(
        self, pod: str, container: str, command: Sequence[str], *, stdin: bool = False
    ) -> Any: ...


def storage_options(storage: Storage) -> list[str]:
    """Return the options that tell the trainer's tools where the folders of runs are."""
    endpoint = ["--endpoint", storage.endpoint] if storage.endpoint else []
    return ["--path", storage.path, *endpoint]


class RemoteFolder:
    """The folder of a run, through a pod that mounts the storage.

    Each method executes one of the trainer's tools in the pod. All methods raise ClusterError if the tool
    fails.
    """

    def __init__(
        self, cluster: PodAccess, platform: Platform, run: str, pod: str, container: str
    ) -> None:
        self.run = run
        """The name of the run."""
        self._cluster = cluster
        self._platform = platform
        self._pod = pod
        self._container = container

    def files(self) -> list[str]:
        """Return the paths of all files in the folder; an empty list if there is no folder."""
        found = self._output()
        return [] if found is None else found.decode(errors="replace").splitlines()

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of each file; an empty mapping if there is no folder."""
        lines = (self._output("--sizes") or b"").decode(errors="replace").splitlines()
        return {name: int(size) for size, _, name in (line.partition(" ") for line in lines)}

    def read(self, file: str) -> str | None:
        """Return the text of a file, or None if it does not exist."""
        found: list[bytes] = []
        with self._archive(file) as archive:
            for entry in archive:
                source = archive.extractfile(entry)
                found.append(b"" if source is None else source.read())
        return found[0].decode(errors="replace") if found else None

    def records(self, file: str) -> list[Object]:
        """Return the records of a file with one JSON object for each line.

        A line that is not JSON is left out: the last line may still be being written.
        """
        records: list[Object] = []
        for line in (self.read(file) or "").splitlines():
            with suppress(ValueError):
                records.append(json.loads(line))
        return records

    def sum(self, file: str) -> str | None:
        """Return the SHA-256 of a file in hexadecimal, or None if it does not exist."""
        with self._command(file, "--sum") as process:
            stream = OutputStream(process)
            text = stream.read().decode().strip()
            return text if self._exists(process, stream.errors) else None

    def sibling(self, run: str) -> RemoteFolder:
        """Return the folder of another run, through the same pod."""
        return RemoteFolder(self._cluster, self._platform, run, self._pod, self._container)

    def workers(self) -> list[Object]:
        """Return the pod and process of each rank of the newest attempt, as workers.json has them."""
        text = self.read(names.WORKERS)
        workers: list[Object] = [] if text is None else json.loads(text)["workers"]
        return workers

    def logs(self) -> list[int]:
        """Return the numbers of the attempts whose logs are in the folder, oldest first."""
        attempts = map(names.attempt_of_log, self.files())
        return sorted(attempt for attempt in attempts if attempt is not None)

    def delete(self) -> bool:
        """Delete the folder with all its files; return False if there was none."""
        return self._output("--delete") is not None

    def set_aside(self) -> str | None:
        """Rename the folder, so that the run can start from the beginning.

        Return the new name of the folder, or None if there was nothing to rename.
        """
        with self._tool("run_folder.set_aside", self.run) as process:
            stream = OutputStream(process)
            name = stream.read().decode().strip()
            if process.exit_code != 0:
                raise ClusterError(
                    f"the folder of run {self.run} could not be set aside",
                    *_last_lines(stream.errors.removeprefix(ERROR)),
                )
        return name or None

    def put(
        self,
        file: str,
        data: bytes,
        sha256: str,
        on_arrival: Callable[[int], object] = lambda arrived: None,
    ) -> None:
        """Write a file, completely or not at all.

        `on_arrival` is called with the number of bytes that have arrived. Raises ClusterError if the bytes
        that have arrived do not have the SHA-256 `sha256`.
        """
        with self._tool("tools.folder", "--put", f"{len(data)}", sha256, self.run, file) as process:
            errors = send(process, data, on_arrival)
            if process.exit_code != 0:
                raise ClusterError(
                    f"{file} could not be written to the folder of run {self.run} in pod {self._pod}",
                    *_last_lines(errors.removeprefix(ERROR)),
                )

    def copy(self, path: str, target: Path) -> list[Path]:
        """Copy a file, a folder or the whole run to this machine, and return the paths written.

        The copy is checked by SHA-256. Raises ConfigError if there is no such path, ClusterError if bytes
        were lost.
        """
        with self._archive(path) as archive:
            written = unpack(archive, path, target)
        if not written:
            raise ConfigError(
                f"run {self.run} has no {path or 'folder'}",
                f"`trainyard cp {self.run}: {self._cluster.options}` lists its files.",
            )
        return written

    @contextmanager
    def _archive(self, path: str) -> Iterator[tarfile.TarFile]:
        """Open the files below a path as an archive; it is empty if the path does not exist.

        Raises ClusterError if the bytes that have arrived are not those that were sent.
        """
        with self._command(path, "--archive") as process:
            stream = OutputStream(process)
            try:
                if stream.is_empty():
                    with tarfile.open(fileobj=io.BytesIO(_EMPTY_ARCHIVE)) as nothing:
                        yield nothing
                else:
                    with tarfile.open(fileobj=stream, mode="r|") as archive:
                        yield archive
            except (tarfile.TarError, ValueError) as error:  # ValueError: a number in a header
                stream.finish()
                self._exists(process, stream.errors)
                raise ClusterError(
                    f"the copy of {self.run}:{path} broke off", str(error), "Copy it again."
                ) from error
            stream.finish()
            if self._exists(process, stream.errors) and not stream.is_whole:
                raise ClusterError(
                    f"the copy of {self.run}:{path} is not what was sent",
                    f"{stream.length:,} bytes came, of SHA-256 {stream.sum}. Copy it again.",
                )

    def _output(self, *options: str) -> bytes | None:
        """Return the output of the folder tool for the whole folder; None if there is no folder."""
        with self._command("", *options) as process:
            stream = OutputStream(process)
            text = stream.read()
            return text if self._exists(process, stream.errors) else None

    def _command(self, file: str, *options: str) -> Any:
        """Start the folder tool for a file of the run, or for the whole folder if `file` is empty."""
        return self._tool("tools.folder", *options, self.run, *([file] if file else []))

    def _tool(self, module: str, *words: str) -> Any:
        """Start a module of the trainer in the pod, with the options of the storage."""
        options = storage_options(self._platform.storage)
        command = [*IN_PODS, f"trainyard_trainer.{module}", *options, *words]
        return self._cluster.execute(self._pod, self._container, command, stdin=True)

    def _exists(self, process: RemoteCommand, errors: str) -> bool:
        """Return whether the tool has found the file or folder. Raises ClusterError if it failed."""
        if process.exit_code == NOT_FOUND:
            return False
        if process.exit_code != 0:
            raise ClusterError(
                f"reading the folder of run {self.run} in pod {self._pod} failed",
                *_last_lines(errors),
            )
        return True


def _last_lines(text: str) -> list[str]:
    return text.strip().splitlines()[-ERROR_LINES:]
