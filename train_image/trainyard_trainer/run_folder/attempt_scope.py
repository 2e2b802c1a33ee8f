"""The scope of an attempt: its log, the clean-up before it, and the summary if it fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from trainyard_trainer import front_end
from trainyard_trainer.errors import RunError, StorageError, TrainerError
from trainyard_trainer.run_files import names
from trainyard_trainer.run_files.driver_output import INTERRUPTED
from trainyard_trainer.run_folder import final_failure, set_aside
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.log import Output
from trainyard_trainer.run_folder.ownership.fence import Fenced
from trainyard_trainer.run_folder.ownership.lease import Lease
from trainyard_trainer.run_folder.run_record import RunRecord
from trainyard_trainer.run_folder.stop_signals import Leaving, StoppedBySignal, fail_on_sigterm


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


def say(line: str) -> None:
    print(line, flush=True)
