"""The folder of a run, from the command line.

    python -m trainyard_trainer.tools.folder --path PATH [--endpoint URL]
        [--archive | --delete | --put LENGTH SHA256 | --sizes | --sum] NAME [FILE]

prints one file of the run NAME, or its SHA-256, or lists them all, on request with their sizes; as an
archive, prints a file, a folder or the whole; writes a file; or removes the whole.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tarfile
from pathlib import PurePosixPath
from typing import IO

from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_files.exit_codes import NOT_FOUND
from trainyard_trainer.run_folder.folder import RunFolder


def _print_file(folder: RunFolder, file: str, output: IO[bytes]) -> None:
    with folder.filesystem.open_input_stream(f"{folder.root}/{file}", compression=None) as stream:
        while chunk := stream.read(2**20):
            output.write(chunk)
    output.flush()


def _put(folder: RunFolder, file: str, length: int, sha256: str) -> int:
    """Write a file from standard input; what has come of it is said, and 0 when it is awaited."""

    def told(size: int) -> None:
        print(size, flush=True)

    try:
        folder.put(f"{folder.root}/{file}", sys.stdin.buffer, length, sha256, told)
    except (OSError, ValueError) as error:
        print(f"error: {file} of run {folder.name} was not written: {error}", file=sys.stderr)
        return 1
    return 0


class _Summed:
    """What passes through to a stream, its SHA-256 and its length."""

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


def _print_archive(folder: RunFolder, names: list[str], below: str, output: IO[bytes]) -> str:
    """Print these files as a tar archive, with names that begin at `below`; its SHA-256 and length."""
    summed = _Summed(output)
    with tarfile.open(fileobj=summed, mode="w|") as archive:  # type: ignore[call-overload]
        for name in names:
            path = f"{folder.root}/{name}"
            entry = tarfile.TarInfo(str(PurePosixPath(name).relative_to(below)))
            # A file that grows meanwhile is taken as it was.
            entry.size = folder.size(path) or 0
            with folder.filesystem.open_input_stream(path, compression=None) as stream:
                archive.addfile(entry, stream)
    return summed.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainyard_trainer.tools.folder", allow_abbrev=False
    )
    parser.add_argument("--path", required=True, help="where the folders of runs lie")
    parser.add_argument("--endpoint", help="address of an S3 server that is not AWS")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--archive",
        action="store_true",
        help="print a tar archive of the file, of the folder FILE, or of the whole run; its SHA-256 "
        "and length are the last line of standard error",
    )
    how.add_argument("--delete", action="store_true", help="remove the run's folder")
    how.add_argument(
        "--put",
        nargs=2,
        metavar=("LENGTH", "SHA256"),
        help="write FILE from standard input; how many bytes have come is printed meanwhile",
    )
    how.add_argument("--sizes", action="store_true", help="list all files, each after its bytes")
    how.add_argument("--sum", action="store_true", help="print the SHA-256 of FILE")
    parser.add_argument("name", help="the run")
    parser.add_argument("file", nargs="?", help="print this file; without it, list all files")
    wanted = parser.parse_args(arguments)

    parts = PurePosixPath(wanted.name, wanted.file or "").parts
    if ".." in parts or PurePosixPath(wanted.file or "").is_absolute() or "/" in wanted.name:
        parser.error("NAME and FILE must lie below PATH")
    try:
        folder = RunFolder.open(wanted.path, wanted.name, wanted.endpoint)
    except ConfigError as error:
        parser.error(str(error))

    if wanted.put:
        if wanted.file is None or not wanted.put[0].isdecimal():
            parser.error("--put LENGTH SHA256 writes one FILE of so many bytes")
        return _put(folder, wanted.file, int(wanted.put[0]), wanted.put[1])
    sizes = folder.sizes() if wanted.file is None or wanted.archive else {}
    files = sorted(sizes)
    if wanted.sum and wanted.file is None:
        parser.error("--sum is of one FILE")
    if wanted.sizes and wanted.file is not None:
        parser.error("--sizes are of the whole folder: leave FILE out")
    if wanted.file is None and not files:
        print(f"error: there is no run {wanted.name} in {wanted.path}", file=sys.stderr)
        return NOT_FOUND
    if wanted.delete:
        if wanted.file is not None:
            parser.error("--delete removes the whole folder: leave FILE out")
        folder.delete(folder.root)
        return 0
    if wanted.archive:
        root = (wanted.file or "").strip("/")
        names = [name for name in files if not root or name == root or name.startswith(f"{root}/")]
        if names:
            below = str(PurePosixPath(root).parent) if root in names else root
            told = _print_archive(folder, names, below, sys.stdout.buffer)
            print(told, file=sys.stderr, flush=True)
            # Kubernetes throws away what a slow reader has not got 10 s after the end of a program: this
            # one ends when the reader says so.
            sys.stdin.buffer.read(1)
            return 0
    elif wanted.sizes:
        for name in files:
            print(sizes[name], name)
        return 0
    elif wanted.file is None:
        print("\n".join(files))
        return 0
    if wanted.archive or folder.size(f"{folder.root}/{wanted.file}") is None:
        print(
            f"error: run {wanted.name} in {wanted.path} has no file {wanted.file}", file=sys.stderr
        )
        return NOT_FOUND
    if wanted.sum:
        print(folder.sha256(f"{folder.root}/{wanted.file}"))
    else:
        _print_file(folder, wanted.file, sys.stdout.buffer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
