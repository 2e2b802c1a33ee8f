"""An attempt's hold on the folder of its run: its log, and what becomes of it where the attempt fails."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trainyard_trainer.config.trainer_config import Storage
from trainyard_trainer.errors import RunError
from trainyard_trainer.run_folder import set_aside
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.lease import Fenced, Lease
from trainyard_trainer.run_folder.log import Output


@contextmanager
def storage_explained(storage: Storage) -> Iterator[None]:
    """What the storage refuses is a failure of the run. Raises RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"the storage {storage.path} cannot be used: {error}\n"
            "       It must be a folder or bucket that this machine may read and write."
        ) from error


@contextmanager
def under_way(
    folder: RunFolder, lease: Lease, output: Output, failed: Callable[[str], dict[str, Any]]
) -> Iterator[None]:
    """The attempt that holds the lease, with its log in the folder; what earlier ones left is put in order.

    Of an error `failed` makes what summary.json says.
    """
    output.keep_in(folder, folder.log(lease.attempt))
    fail_on_sigterm()
    try:
        folder.sweep()
        set_aside.finish(folder, lease)
        # Until this attempt has ended, the run has no outcome.
        folder.delete(folder.summary)
        yield
    except (Fenced, Leaving):
        raise  # The folder is another attempt's, or soon will be.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            error = RunError("the run was interrupted; started again, it goes on from there")
        line = (str(error).splitlines() or [type(error).__name__])[0]
        folder.write(folder.summary, json.dumps(failed(line), indent=2))
        raise error


def fail_on_sigterm() -> None:
    """Turn the first SIGTERM into an error of the main thread, which leaves in good order."""
    signal.signal(signal.SIGTERM, _leave)


def fail_on_sigusr1() -> None:
    """The same for what `trainyard_trainer.on_ray.leaving` sends."""
    signal.signal(signal.SIGUSR1, _leave)


def _leave(signum: int, frame: object) -> None:
    """For one reason only: the second signal of the two would disturb what the first has begun."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    raise Leaving if signum == signal.SIGUSR1 else Stopped


class Stopped(RunError):
    """SIGTERM came."""

    notice = "SIGTERM"
    """What came, before it is said what comes of it."""

    def __init__(self) -> None:
        super().__init__("the run was stopped by SIGTERM; started again, it goes on from there")


class Leaving(Stopped):
    """The pod of this process is about to go."""

    notice = "this pod goes away"

    def __init__(self) -> None:
        RunError.__init__(self, "this pod goes away: the run is given back, and goes on in another")


def say(line: str) -> None:
    print(line, flush=True)
