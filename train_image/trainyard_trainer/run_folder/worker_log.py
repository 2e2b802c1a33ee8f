"""Keep what a worker prints in the run's folder, so that it can be read after the worker is gone.

Ray writes the standard output and error of each worker process to two files on the worker's machine. A thread
of the worker copies the end of both to one file of the run, every 10 s or less often. A worker that is killed
leaves what it had printed until the last copy.

The files of a run are bounded: each has at most 1 MiB, all of a worker group have at most 512 MiB, and the
last 5 worker groups of a run are kept. All workers together write at most 50 times per second.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainyard_trainer.errors import StorageError
from trainyard_trainer.run_files.names import LOGS, group_of_logs, worker_logs_of
from trainyard_trainer.run_folder.folder import RunFolder

INTERVAL_S = 10.0
"""Seconds between two copies of a small group's logs."""

WRITES_PER_S = 50
"""The largest number of copies that all workers of a group make in a second."""

FILE_BYTES = 2**20
"""The largest size of a worker's log."""

GROUP_BYTES = 2**29
"""The largest size of all logs of a worker group."""

KEPT_GROUPS = 5
"""The number of worker groups of a run whose logs are kept."""

RAY_MARKS = re.compile(rb"^:(actor_name|job_id|task_name):.*\n", re.MULTILINE)
"""Lines by which Ray finds the job, task or actor of what follows. They say nothing to a reader."""

LEFT_OUT = b"(earlier output was left out)\n"
"""The first line of a log whose beginning did not fit."""

REPLACED = b"(this worker was lost; what follows is of the one that has replaced it)\n"
"""The line between the log of a lost worker and that of its replacement."""


def interval_s(world_size: int) -> float:
    """Return the seconds between two copies of the log of one of so many workers."""
    return max(INTERVAL_S, world_size / WRITES_PER_S)


def limit_bytes(world_size: int) -> int:
    """Return the largest size of the log of one of so many workers."""
    return min(FILE_BYTES, GROUP_BYTES // world_size)


def own_streams() -> list[Path]:
    """Return the files to which this process writes its standard output and error; none for a pipe."""
    targets = [Path(f"/proc/self/fd/{number}").readlink() for number in (1, 2)]
    return list(dict.fromkeys(path for path in targets if path.is_file()))


class WorkerLog:
    """Copies the end of some growing files to one file of the run, in a thread."""

    def __init__(
        self,
        folder: RunFolder,
        file: str,
        streams: Sequence[Path],
        *,
        interval_s: float,
        first_s: float,
        limit: int,
        continues: bool = False,
    ) -> None:
        """Start to copy `streams` to `file`, first after `first_s` seconds, then every `interval_s`.

        With `continues`, what the file has stays in it: a lost worker of the same rank has written it.
        """
        self._folder = folder
        self._path = f"{folder.root}/{file}"
        self._offsets = dict.fromkeys(streams, 0)
        self._limit = limit
        self._kept = bytearray()
        if continues and folder.exists(self._path):
            self._kept += folder.read(self._path) + REPLACED
        self._is_cut = False
        self._is_written = True
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(first_s, interval_s), name="worker-log", daemon=True
        )
        self._thread.start()

    def end(self, last_words: str = "") -> None:
        """Copy the rest, with `last_words` below it, and end the thread."""
        self._stop.set()
        self._thread.join()
        self._read()
        if last_words:
            self._keep(f"{last_words.rstrip()}\n".encode(errors="replace"))
        self._write()

    def _run(self, first_s: float, interval_s: float) -> None:
        wait_s = first_s
        while not self._stop.wait(wait_s):
            self._read()
            self._write()
            wait_s = interval_s

    def _read(self) -> None:
        """Take what the streams have got since the last time, of each at most as much as is kept."""
        for stream, offset in self._offsets.items():
            with suppress(FileNotFoundError), stream.open("rb") as file:
                size = file.seek(0, 2)
                # Ray begins a new file of the same name when one is large.
                begin = offset if size >= offset else 0
                if size - begin > self._limit:
                    begin, self._is_cut = size - self._limit, True
                file.seek(begin)
                self._keep(RAY_MARKS.sub(b"", file.read(size - begin)))
                self._offsets[stream] = size

    def _keep(self, data: bytes) -> None:
        self._kept += data
        self._is_written = self._is_written and not data
        if len(self._kept) > self._limit:
            # Whole lines, if the log has any that are not too long.
            begin = len(self._kept) - self._limit
            line = self._kept.find(b"\n", begin) + 1
            del self._kept[: line or begin]
            self._is_cut = True

    def _write(self) -> None:
        """Write the file unless it is up to date; what the storage refuses comes with the next copy."""
        if self._is_written:
            return
        with suppress(StorageError):
            data = (LEFT_OUT if self._is_cut else b"") + self._kept
            self._folder.write(self._path, bytes(data), is_durable=False)
            self._is_written = True


def begin_group(folder: RunFolder, attempt: int) -> int:
    """Return the number of a new worker group of the attempt, from 1; remove the logs of old groups."""
    place = f"{folder.root}/{LOGS}"
    found = (group_of_logs(name) for name in folder.subfolders(place))
    groups = sorted(group for group in found if group is not None)
    for old in groups[: max(len(groups) - KEPT_GROUPS + 1, 0)]:
        folder.delete(f"{folder.root}/{worker_logs_of(*old)}")
    return 1 + max((number for of, number in groups if of == attempt), default=0)
