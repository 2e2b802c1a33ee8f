"""Make standard output and standard error of a program safe to write: any encoding, closed, or a closed pipe.

* A character that the encoding does not have is written as an escape such as `\\xe9`.
* If the reader of standard output is gone, the program ends with exit code 141, the code of SIGPIPE.
* If standard output cannot be written, the program says so and ends with exit code 1.
* What standard error cannot take is dropped: it holds only progress and messages, and the work continues.

SIGPIPE keeps Python's setting, because it would end the program for a closed socket too.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any

from trainyard_trainer.run_files.exit_codes import FAILED, OUTPUT_CLOSED

STDIN, STDOUT, STDERR = range(3)


class OutputError(Exception):
    """Standard output cannot be written; `exit_code` is that of the program."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"error: standard output cannot be written: {error.strerror}")
        self.exit_code = OUTPUT_CLOSED if isinstance(error, BrokenPipeError) else FAILED


class _Stdout(io.FileIO):
    """File descriptor 1, whose errors are told apart from those of other files and of sockets."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputError(error) from error


class _Stderr(io.FileIO):
    """File descriptor 2, which drops what it cannot write."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def run_with_safe_streams(program: Callable[[], int]) -> int:
    """Run a program with safe standard streams and return its exit code, or that of an OutputError."""
    _open_missing_descriptors()
    sys.stdout = _text(_Stdout(STDOUT, "w", closefd=False), sys.stdout, "backslashreplace")
    sys.stderr = _text(_Stderr(STDERR, "w", closefd=False), sys.stderr, "backslashreplace")
    try:
        code = program()
        sys.stdout.flush()
    except OutputError as error:
        if error.exit_code != OUTPUT_CLOSED:
            print(error, file=sys.stderr)
        code = error.exit_code
    finally:
        # The interpreter flushes both again when it ends: what is left in the buffers has nowhere to go.
        _discard_unwritten()
    return code


def _open_missing_descriptors() -> None:
    """Open descriptors 0, 1 and 2 if they are closed, so that no other file gets their numbers.

    Reading finds the end of the file, and writing to standard output fails.
    """
    for number, mode in ((STDIN, os.O_RDONLY), (STDOUT, os.O_RDONLY), (STDERR, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, mode)
            assert opened == number
            os.set_inheritable(opened, True)
    if sys.stdin is None:
        sys.stdin = open(STDIN, closefd=False)  # noqa: SIM115 - a descriptor, for the whole program


def _text(raw: io.FileIO, before: Any, errors: str) -> io.TextIOWrapper:
    """Return a text stream with the encoding and the buffering of the one that it replaces."""
    is_stderr = raw.fileno() == STDERR
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=before.encoding if before is not None else "utf-8",
        errors=errors,
        line_buffering=is_stderr or raw.isatty(),
        write_through=before is not None and before.write_through,
    )


def _discard_unwritten() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OutputError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, STDOUT)
            os.close(nowhere)
            stream.flush()
