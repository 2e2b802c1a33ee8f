"""Save a checkpoint before Ray Train resizes the worker group of an elastic run.

Ray Train itself ends the workers without notice, so the steps since the last checkpoint would be repeated.
"""

from __future__ import annotations

import time
from typing import Any

from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller.state import ResizingState

from trainyard_trainer.config.storage import Storage
from trainyard_trainer.errors import StorageError
from trainyard_trainer.run_folder import failures
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.ownership.fence import newest_group

POLL_S = 0.5
"""The interval in seconds at which the workers' status is polled."""


class SaveBeforeResize(WorkerGroupCallback, ControllerCallback):
    """A callback that blocks Ray Train's controller until the workers have saved a checkpoint and ended."""

    def __init__(self, storage: Storage, run: str, attempt: int) -> None:
        self._storage = storage
        self._run = run
        self._attempt = attempt

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._group = worker_group

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        if not isinstance(current_state, ResizingState):
            return
        print(
            "the worker group is being resized: its workers save a checkpoint and end", flush=True
        )
        try:
            folder = RunFolder.open(self._storage.path, self._run, self._storage.endpoint)
            self._await_end(folder)
        except StorageError as error:
            # An exception here would end the run.
            print(
                f"the workers could not be asked to save a checkpoint: {error.problem}", flush=True
            )

    def _await_end(self, folder: RunFolder) -> None:
        """Ask the workers to stop, and wait until all have ended, or one has failed or hangs."""
        asked, is_logged = 0, False
        while True:
            status = self._group.poll_status(timeout=POLL_S)
            if status.errors:
                lines = failures.record(folder, self._attempt, status.errors)
                print("\n".join(lines), flush=True)
            if status.errors or status.finished:
                return
            try:
                # A new worker group claims the folder shortly after its start.
                group = newest_group(folder, self._attempt)
                if group != asked:
                    folder.write(folder.stop(self._attempt, group), "")
                    asked = group
            except StorageError as error:
                # The storage may be unavailable for a while: the workers continue to train.
                if not is_logged:
                    print(
                        f"the workers cannot be asked to save a checkpoint yet: {error.problem}",
                        flush=True,
                    )
                is_logged = True
            time.sleep(POLL_S)
