"""The command line that reads and writes the folder of a run.

    python -m trainyard_trainer.tools.folder --path PATH [--endpoint URL]
        [--archive | --delete | --put LENGTH SHA256 | --sizes | --sum] NAME [FILE]

Without FILE it lists the files of the run NAME (`--sizes`: with their sizes), prints them all as a tar
archive (`--archive`), or deletes them (`--delete`). With FILE it prints that file, its SHA-256 (`--sum`), an
archive of that file or folder (`--archive`), or writes the file from standard input (`--put`).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO

from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_files.exit_codes import NOT_FOUND
from trainyard_trainer.run_folder.folder import RunFolder


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    wanted = parser.parse_args(arguments)
    _refuse_wrong_combinations(parser, wanted)
    try:
        folder = RunFolder.open(wanted.path, wanted.name, wanted.endpoint)
    except ConfigError as error:
        parser.error(str(error))
    if wanted.put:
        return _put(folder, wanted.file, int(wanted.put[0]), wanted.put[1])
    return _handle_run(folder, wanted) if wanted.file is None else _handle_file(folder, wanted)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainyard_trainer.tools.folder", allow_abbrev=False
    )
    parser.add_argument("--path", required=True, help="the folder that holds the folders of runs")
    parser.add_argument("--endpoint", help="the address of an S3 server other than AWS")
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--archive",
        action="store_true",
        help="print a tar archive of the file, of the folder FILE, or of the whole run; the last line of "
        "standard error has its SHA-256 and length",
    )
    action.add_argument("--delete", action="store_true", help="delete the run's folder")
    action.add_argument(
        "--put",
        nargs=2,
        metavar=("LENGTH", "SHA256"),
        help="write FILE from standard input, and print how many bytes have arrived",
    )
    action.add_argument("--sizes", action="store_true", help="list all files, each after its size")
    action.add_argument("--sum", action="store_true", help="print the SHA-256 of FILE")
    parser.add_argument("name", help="the name of the run")
    parser.add_argument(
        "file", nargs="?", help="the file to print; without it, all files are listed"
    )
    return parser


def _refuse_wrong_combinations(parser: argparse.ArgumentParser, wanted: argparse.Namespace) -> None:
    """End the process with exit code 2 if the arguments do not fit together."""
    parts = PurePosixPath(wanted.name, wanted.file or "").parts
    if ".." in parts or PurePosixPath(wanted.file or "").is_absolute() or "/" in wanted.name:
        parser.error("NAME and FILE must lie below PATH")
    if wanted.put and (wanted.file is None or not wanted.put[0].isdecimal()):
        parser.error("--put LENGTH SHA256 writes one FILE of so many bytes")
    if wanted.sum and wanted.file is None:
        parser.error("--sum needs a FILE")
    if wanted.sizes and wanted.file is not None:
        parser.error("--sizes lists the whole folder: leave FILE out")
    if wanted.delete and wanted.file is not None:
        parser.error("--delete removes the whole folder: leave FILE out")


def _handle_run(folder: RunFolder, wanted: argparse.Namespace) -> int:
    """List, archive or delete all files of the run."""
    sizes = folder.sizes()
    if not sizes:
        print(f"error: there is no run {wanted.name} in {wanted.path}", file=sys.stderr)
        return NOT_FOUND
    if wanted.delete:
        folder.delete(folder.root)
    elif wanted.archive:
        _print_archive(folder, sorted(sizes), "")
    else:
        for name in sorted(sizes):
            print(f"{sizes[name]} {name}" if wanted.sizes else name)
    return 0


def _handle_file(folder: RunFolder, wanted: argparse.Namespace) -> int:
    """Print or archive one file, its SHA-256, or one folder of the run."""
    if wanted.archive:
        root = wanted.file.strip("/")
        names = [name for name in folder.files() if name == root or name.startswith(f"{root}/")]
        if names:
            below = str(PurePosixPath(root).parent) if root in names else root
            _print_archive(folder, names, below)
            return 0
    elif folder.size(f"{folder.root}/{wanted.file}") is not None:
        if wanted.sum:
            print(folder.sha256(f"{folder.root}/{wanted.file}"))
        else:
            _print_file(folder, wanted.file, sys.stdout.buffer)
        return 0
    print(f"error: run {wanted.name} in {wanted.path} has no file {wanted.file}", file=sys.stderr)
    return NOT_FOUND


def _print_file(folder: RunFolder, file: str, output: IO[bytes]) -> None:
    for chunk in folder.chunks(f"{folder.root}/{file}"):
        output.write(chunk)
    output.flush()


def _put(folder: RunFolder, file: str, length: int, sha256: str) -> int:
    """Write a file from standard input, and print how many bytes have arrived; 0 when it is ready to read."""

    def print_size(size: int) -> None:
        print(size, flush=True)

    try:
        folder.put(f"{folder.root}/{file}", sys.stdin.buffer, length, sha256, print_size)
    except (OSError, ValueError) as error:
        print(f"error: {file} of run {folder.name} was not written: {error}", file=sys.stderr)
        return 1
    return 0


class _HashingWriter:
    """A writer that passes all bytes on to a stream, and computes their SHA-256 and length."""

    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._sum = hashlib.sha256()
        self._length = 0

    def write(self, data: bytes) -> int:
        self._sum.update(data)
        self._length += len(data)
        return self._output.write(data)

    def close(self) -> str:
        self._output.flush()
        return f"sha256 {self._sum.hexdigest()} {self._length}"


class _ChunkReader:
    """The part of a binary file object that `tarfile` needs, for the chunks of a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, size: int) -> bytes:
        while len(self._rest) < size and (chunk := next(self._chunks, b"")):
            self._rest += chunk
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


def _print_archive(folder: RunFolder, names: list[str], below: str) -> None:
    """Print these files as a tar archive, with names relative to `below`, and wait for the reader's byte."""
    writer = _HashingWriter(sys.stdout.buffer)
    with tarfile.open(fileobj=writer, mode="w|") as archive:  # type: ignore[call-overload]
        for name in names:
            path = f"{folder.root}/{name}"
            entry = tarfile.TarInfo(str(PurePosixPath(name).relative_to(below)))
            # A file that grows meanwhile is archived with the size that it had.
            entry.size = folder.size(path) or 0
            archive.addfile(entry, _ChunkReader(folder.chunks(path)))
    print(writer.close(), file=sys.stderr, flush=True)
    # Kubernetes drops the output that a slow reader has not received 10 s after a program has ended, so this
    # program ends only when the reader sends a byte.
    sys.stdin.buffer.read(1)


if __name__ == "__main__":
    sys.exit(main())
