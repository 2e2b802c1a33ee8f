"""The scope of an attempt: its log, the clean-up before it, its signals, and the summary if it fails."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from trainyard_trainer import front_end
from trainyard_trainer.errors import RunError, StorageError, TrainerError
from trainyard_trainer.run_files import names
from trainyard_trainer.run_files.driver_output import BY_SIGNAL, INTERRUPTED
from trainyard_trainer.run_folder import final_failure, set_aside
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.log import Output
from trainyard_trainer.run_folder.ownership.fence import Fenced
from trainyard_trainer.run_folder.ownership.lease import Lease
from trainyard_trainer.run_folder.run_record import RunRecord


@contextmanager
def running_attempt(
    folder: RunFolder,
    lease: Lease,
    output: Output,
    failed: Callable[[str], dict[str, Any]],
    *,
    retries: int,
    record: RunRecord,
) -> Iterator[None]:
    """Run the attempt that holds the lease, with its log and its record in the run's folder.

    First the files that killed attempts left behind are removed. If the attempt fails, summary.json gets
    what `failed` returns for the first line of the error, with the outcome `stopped` for a run that was told
    to stop. An error that a retry cannot cure is recorded for the `retries` that KubeRay starts.
    """
    output.keep_in(folder, folder.log(lease.attempt))
    front_end.keep_stderr_in(f"{folder.root}/{names.RAY_LOG}")
    fail_on_sigterm()
    try:
        folder.sweep()
        set_aside.finish(folder, lease)
        # The run has no outcome until this attempt has ended.
        folder.delete(folder.summary)
        yield
    except Leaving:
        with suppress(StorageError):
            record.end()
        raise  # The folder will soon belong to another attempt.
    except Fenced:
        raise  # The folder belongs to another attempt.
    except BaseException as error:
        is_stopped = isinstance(error, StoppedBySignal | KeyboardInterrupt)
        if isinstance(error, KeyboardInterrupt):
            error = RunError(f"{INTERRUPTED}; started again, it goes on from there")
        line = (str(error).splitlines() or [type(error).__name__])[0]
        outcome = {"outcome": "stopped"} if is_stopped else {}
        try:
            summary = failed(line) | outcome | record.end()
            folder.write(folder.summary, json.dumps(summary, indent=2))
            if isinstance(error, TrainerError):
                final_failure.record(folder, lease.attempt, error, retries)
        except StorageError as trouble:
            # On a full disk this fails too. The error that ended the attempt must not be lost for it.
            say(f"warning: the run's folder has no record of the error: {trouble.problem}")
        raise error
    finally:
        record.stop()


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
        super().__init__(f"{BY_SIGNAL}; started again, it goes on from there")


class Leaving(StoppedBySignal):
    """The pod of this process is being deleted: the run resumes in another pod."""

    notice = "this pod goes away"

    def __init__(self) -> None:
        RunError.__init__(self, "this pod goes away: the run is given back, and goes on in another")


def say(line: str) -> None:
    print(line, flush=True)
