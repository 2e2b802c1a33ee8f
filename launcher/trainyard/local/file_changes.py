"""Watch files in other threads, and interrupt the main thread when they have changed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import watchfiles

FIRST_LOOK_MS = 500
"""Milliseconds after which it is looked for a change that was made before the files were watched."""


class FilesChanged(Exception):
    """The files of a run are not what they were when it was started."""


class Changes:
    """Tells that files have changed: by an exception in the main thread, or to the one who waits for it."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._changed = threading.Event()
        self._is_interruptible = False

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise FilesChanged, once, in the block as soon as files have changed."""
        before = signal.signal(signal.SIGUSR1, self._interrupt)
        self._is_interruptible = True
        try:
            if self._changed.is_set():
                self._interrupt(signal.SIGUSR1, None)
            yield
        finally:
            self._is_interruptible = False
            signal.signal(signal.SIGUSR1, before)

    @property
    def have_come(self) -> bool:
        """Whether files have changed since the start."""
        return self._changed.is_set()

    def wait(self) -> None:
        """Wait until files have changed."""
        self._changed.wait()

    def note(self) -> None:
        """Note that files have changed, and tell the main thread."""
        self._changed.set()
        if self._is_interruptible:
            signal.pthread_kill(self._main, signal.SIGUSR1)

    def _interrupt(self, number: int, frame: object) -> None:
        if self._is_interruptible:
            self._is_interruptible = False
            raise FilesChanged


@contextmanager
def watching(
    file: Path, folder: Path | None, ignored: Path, matters: Callable[[], bool]
) -> Iterator[Changes]:
    """Watch a file, and a folder with all that is below it but `ignored`; yield what tells of a change.

    `matters` is called after each change, and returns whether it counts. Only the first that does is told.
    """
    changes, ended = Changes(), threading.Event()

    def watch(path: Path, *, is_recursive: bool) -> None:
        found = watchfiles.watch(
            path,
            watch_filter=watchfiles.DefaultFilter(ignore_paths=[ignored]),
            recursive=is_recursive,
            stop_event=ended,
            rust_timeout=FIRST_LOOK_MS,
            yield_on_timeout=True,
        )
        for number, changed in enumerate(found):
            if (changed or number == 0) and matters():
                changes.note()
                return

    # An editor may replace the file, so its folder is watched.
    watched = [(file.parent, False), *([(folder, True)] if folder else [])]
    threads = [
        threading.Thread(target=watch, args=(path,), kwargs={"is_recursive": is_recursive})
        for path, is_recursive in watched
    ]
    for thread in threads:
        thread.start()
    try:
        yield changes
    finally:
        ended.set()
        for thread in threads:
            thread.join()
