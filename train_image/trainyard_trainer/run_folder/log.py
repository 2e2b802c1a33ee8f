"""The log of the driver: copy its output to the head container's log and to a file of the run's folder."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TextIO

from trainyard_trainer.errors import StorageError
from trainyard_trainer.run_files.driver_output import PROGRESS
from trainyard_trainer.run_folder.folder import RunFolder

POLL_S = 1.0


class Output:
    """Copies all that goes to standard output and error to a second stream and to a file of the run.

    The second stream is the head container's own output, so that `kubectl logs` shows what otherwise only
    Ray's job log has.
    """

    def __init__(self, copy_to: str | None = None, *, prefix: str = "") -> None:
        """`copy_to` is the path of the second stream. Each line there begins with `prefix`."""
        self._prefix = prefix
        self._line = ""
        self._lock = threading.Lock()
        self._pending = io.StringIO()
        self._flushed = 0.0
        self._folder: RunFolder | None = None
        self._path = ""
        self._streams = (sys.stdout, sys.stderr)
        self._copy: TextIO | None = None
        if copy_to:
            try:
                self._copy = Path(copy_to).open("a", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                print(f"warning: no copy of this log in {copy_to}: {error}", file=sys.stderr)

    def __enter__(self) -> Output:
        sys.stdout, sys.stderr = (_Copied(stream, self._take) for stream in self._streams)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        sys.stdout, sys.stderr = self._streams
        try:
            self.flush()
        except StorageError as trouble:  # no news beside how the program ends
            print(
                f"warning: the end of this log is not in the run's folder: {trouble.problem}",
                file=sys.stderr,
            )
        if self._copy:
            self._copy.close()

    def keep_in(self, folder: RunFolder, path: str) -> None:
        """From now on all that was said and will be said lies in this file of the run, too."""
        self._folder, self._path = folder, path

    def _take(self, text: str) -> None:
        with self._lock:
            self._pending.write(text)
            if self._copy:
                self._copy.write(self._prefixed(text))
                self._copy.flush()

    def _prefixed(self, text: str) -> str:
        """Return the text for the second stream; with a prefix only whole lines, and the rest later."""
        if not self._prefix:
            return text
        *lines, self._line = (self._line + text).split("\n")
        return "".join(f"{self._prefix}{line}\n" for line in lines)

    def flush(self, *, if_older_s: float = 0.0) -> None:
        """Bring the run's file up to date, unless that was done a moment ago.

        Raises StorageError; what could not be written then comes with the next flush.
        """
        if self._folder is None or time.monotonic() - self._flushed < if_older_s:
            return
        with self._lock:
            text = self._pending.getvalue()
            self._pending = io.StringIO()
        self._flushed = time.monotonic()
        if not text:
            return
        try:
            self._folder.append(self._path, text)
        except StorageError:
            with self._lock:
                newer = self._pending.getvalue()
                self._pending = io.StringIO()
                self._pending.write(text + newer)
            raise


class _Copied(io.TextIOBase):
    """A text stream that gives a copy of all it writes."""

    def __init__(self, stream: TextIO, copy: Callable[[str], None]) -> None:
        self._stream = stream
        self._copy = copy

    def write(self, text: str) -> int:
        self._copy(text)
        try:
            self._stream.write(text)
        except BrokenPipeError:
            self._detach()
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._detach()

    def _detach(self) -> None:
        """Write to /dev/null from now on: nobody reads the pipe any more, and the copy has the text."""
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding


class ProgressPrinter:
    """Prints progress.json as one line whenever it has changed, and keeps the run's log up to date."""

    def __init__(self, folder: RunFolder, output: Output, attempt: int) -> None:
        self._folder = folder
        self._output = output
        self._attempt = attempt
        self._last = b""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="progress", daemon=True)

    def __enter__(self) -> ProgressPrinter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._print()

    def _poll(self) -> None:
        while not self._stop.wait(POLL_S):
            self._print()
            with suppress(StorageError):  # the storage is away for a moment
                self._output.flush(if_older_s=self._folder.flush_interval_s)

    def _print(self) -> None:
        try:
            text = self._folder.read(self._folder.progress)
            attempt = json.loads(text)["attempt"]
        except (StorageError, ValueError):
            # Not there yet, or the storage is away for a moment; or a bucket gave the beginning of one
            # object and the end of the next. The next second will tell.
            return
        if text != self._last and attempt == self._attempt:
            self._last = text
            print(f"{PROGRESS}{text.decode()}", flush=True)
