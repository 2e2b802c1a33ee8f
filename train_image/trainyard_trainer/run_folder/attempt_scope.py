"""The scope of an attempt: its log, the clean-up before it, its signals, and the summary if it fails."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainyard_trainer.config.storage import Storage
from trainyard_trainer.errors import RunError
from trainyard_trainer.run_folder import set_aside
from trainyard_trainer.run_folder.fence import Fenced
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.lease import Lease
from trainyard_trainer.run_folder.log import Output


@contextmanager
def explained_storage_errors(storage: Storage) -> Iterator[None]:
    """Turn an OSError of the storage into a RunError that names the storage."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the storage {storage.path} cannot be used: {error}\n"
            "       It must be a folder or bucket that this machine may read and write."
        ) from error


@contextmanager
def running_attempt(
    folder: RunFolder, lease: Lease, output: Output, failed: Callable[[str], dict[str, Any]]
) -> Iterator[None]:
    """Run the attempt that holds the lease, with its log in the run's folder.

    First the files that killed attempts left behind are removed. If the attempt fails, summary.json gets
    what `failed` returns for the first line of the error.
    """
    output.keep_in(folder, folder.log(lease.attempt))
    fail_on_sigterm()
    try:
        folder.sweep()
        set_aside.finish(folder, lease)
        # The run has no outcome until this attempt has ended.
        folder.delete(folder.summary)
        yield
    except (Fenced, Leaving):
        raise  # The folder belongs to another attempt, or soon will.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            error = RunError("the run was interrupted; started again, it goes on from there")
        line = (str(error).splitlines() or [type(error).__name__])[0]
        folder.write(folder.summary, json.dumps(failed(line), indent=2))
        raise error


def fail_on_sigterm() -> None:
    """Raise StoppedBySignal in the main thread at the first SIGTERM."""
    signal.signal(signal.SIGTERM, _leave)


def fail_on_sigusr1() -> None:
    """Raise Leaving in the main thread at SIGUSR1, which `trainyard_trainer.on_ray.leaving` sends."""
    signal.signal(signal.SIGUSR1, _leave)


def _leave(signum: int, frame: object) -> None:
    """Raise the error of the first signal; ignore all further ones, which would disturb the shutdown."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    raise Leaving if signum == signal.SIGUSR1 else StoppedBySignal


class StoppedBySignal(RunError):
    """The process got SIGTERM: the run stops, and resumes when it is started again."""

    notice = "SIGTERM"
    """What happened, as the output names it."""

    def __init__(self) -> None:
        super().__init__("the run was stopped by SIGTERM; started again, it goes on from there")


class Leaving(StoppedBySignal):
    """The pod of this process is being deleted: the run resumes in another pod."""

    notice = "this pod goes away"

    def __init__(self) -> None:
        RunError.__init__(self, "this pod goes away: the run is given back, and goes on in another")


def say(line: str) -> None:
    print(line, flush=True)
