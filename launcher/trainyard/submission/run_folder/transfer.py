"""Bytes to and from a command in a pod: output as a stream, confirmed uploads, archives written to disk."""

from __future__ import annotations

import hashlib
import io
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from trainyard.errors import ClusterError, ClusterUnreachable, ConfigError
from trainyard_trainer.run_files.submission import is_plain_file

STDOUT = 1
"""The number of the channel for standard output."""

CHUNK_BYTES = 2**15
"""How many bytes are sent at a time."""

MAX_UNCONFIRMED_BYTES = 2**21
"""How many bytes may be sent before the command confirms that they have arrived."""

SILENCE_S = 60.0
"""For how many seconds one read waits for output of the command."""

COPY_BYTES = 2**20
"""How many bytes of an archive are copied to the disk at a time."""

_RECEIPT = re.compile(r"sha256 \w+ \d+\n")
"""A line on standard error that tells the SHA-256 and the length of the whole standard output."""


class RemoteCommand(Protocol):
    """The methods of `cluster.process.PodProcess` that a transfer needs."""

    def __enter__(self) -> RemoteCommand: ...
    def __exit__(self, *error: Any) -> None: ...
    @property
    def is_open(self) -> bool: ...
    def read(self, timeout_s: float) -> Iterator[tuple[int, bytes]]: ...
    def output(self) -> Iterator[tuple[int, bytes]]: ...
    def write(self, data: bytes) -> None: ...
    @property
    def exit_code(self) -> int: ...


class OutputStream(io.RawIOBase):
    """The standard output of a command as a readable file; its standard error is collected in `errors`.

    The command may print a line `sha256 SUM LENGTH` on standard error for its whole output. When `LENGTH`
    bytes have arrived, the stream confirms that by an empty line on the command's standard input. The command
    waits for it before it ends, because output that was not read yet is lost when a command ends.
    """

    def __init__(self, process: RemoteCommand) -> None:
        self.errors = ""
        """All of standard error until now."""
        self.length = 0
        """How many bytes of standard output have arrived."""
        self._process = process
        self._pieces = process.output()
        self._unread = b""
        self._sum = hashlib.sha256()
        self._is_confirmed = False

    @property
    def sum(self) -> str:
        """The SHA-256 of the output that has arrived, in hexadecimal."""
        return self._sum.hexdigest()

    @property
    def is_whole(self) -> bool:
        """Whether the output that has arrived has the length and the SHA-256 that the command has told."""
        return f"sha256 {self.sum} {self.length}" in self.errors.splitlines()

    def is_empty(self) -> bool:
        """Return whether the command ends without any output; it waits for the first byte or the end."""
        first = self.read(1)
        self._unread = first + self._unread
        return not first

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes, fewer at the end of the output; all of it for a negative size."""
        pieces = [self._unread]
        length = len(self._unread)
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
            self._confirm()
        whole = b"".join(pieces)
        taken = whole if size < 0 else whole[:size]
        self._unread = whole[len(taken) :]
        return taken

    def finish(self) -> None:
        """Read to the end, so that `sum`, `length` and `errors` are complete."""
        while self.read(2**20):
            pass

    def _confirm(self) -> None:
        if self._is_confirmed:
            return
        lines = self.errors.splitlines(keepends=True)
        lengths = [int(line.split()[2]) for line in lines if _RECEIPT.match(line)]
        if lengths and self.length >= lengths[0]:
            self._is_confirmed = True
            self._process.write(b"\n")


def send(process: RemoteCommand, data: bytes, on_arrival: Callable[[int], object]) -> str:
    """Send data to a command as fast as it confirms it; return its standard error until its end.

    The command prints on standard output how many bytes have arrived, and 0 when it is ready to read: a
    command that fails to start is sent nothing. Each of these numbers is passed to `on_arrival`.
    """
    sent, arrived, is_ready = 0, 0, False
    errors, output = "", b""
    while process.is_open:
        may_send = is_ready and sent < len(data) and sent - arrived < MAX_UNCONFIRMED_BYTES
        if may_send:
            try:
                process.write(data[sent : sent + CHUNK_BYTES])
                sent += CHUNK_BYTES
            except ClusterUnreachable:
                sent = len(data)  # the command has ended, and may have printed why
        for channel, piece in process.read(0 if may_send else SILENCE_S):
            if channel != STDOUT:
                errors += piece.decode(errors="replace")
                continue
            *numbers, output = (output + piece).split(b"\n")
            if numbers:
                is_ready, arrived = True, int(numbers[-1])
                on_arrival(arrived)
    return errors


def unpack(archive: tarfile.TarFile, path: str, target: Path) -> list[Path]:
    """Write the files of an archive of a run's `path` below `target`, and return the paths written.

    A single file is written into `target` if that is a folder, else under that name. The archive comes from
    the run's image and is not trusted. Raises ClusterError for links, devices, sparse files, paths that leave
    the target and files that do not fit on the disk, before anything of them is written. Raises ConfigError
    if this machine refuses to write a file.
    """
    written = []
    for entry in archive:
        if "\0" in entry.name or not is_plain_file(entry):
            raise ClusterError(
                f"the archive of {path} holds {entry.name!r}, which is not a plain file of a run"
            )
        free = shutil.disk_usage(_existing(target)).free
        if entry.size > free:
            raise ClusterError(
                f"{entry.name} has {entry.size:,} bytes, and {target} has room for {free:,}",
                "Free some space, or copy to another disk.",
            )
        is_the_file = entry.name == PurePosixPath(path).name
        file = target if is_the_file and not target.is_dir() else target / entry.name
        source = archive.extractfile(entry)
        assert source is not None  # it is a plain file
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("wb") as output:
                shutil.copyfileobj(source, output, COPY_BYTES)
        except (OSError, UnicodeEncodeError) as error:
            raise ConfigError(f"{file} cannot be written: {error}") from error
        written.append(file)
    return written


def _existing(path: Path) -> Path:
    """Return the path, or its nearest parent folder that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())
