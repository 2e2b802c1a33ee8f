"""Before Ray Train makes an elastic run's worker group larger or smaller, the group saves and leaves.

Ray Train itself ends its workers where they are: the steps since the last checkpoint would be trained again.
"""

from __future__ import annotations

import time
from typing import Any

from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2._internal.execution.controller.state import ResizingState

from trainyard_trainer.config.storage import Storage
from trainyard_trainer.run_folder import failures
from trainyard_trainer.run_folder.fence import newest_group
from trainyard_trainer.run_folder.folder import RunFolder

POLL_S = 0.5


class SaveBeforeResize(WorkerGroupCallback, ControllerCallback):
    """Ray Train's controller has one, and waits for it."""

    def __init__(self, storage: Storage, run: str, attempt: int) -> None:
        self._storage = storage
        self._run = run
        self._attempt = attempt

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._group = worker_group

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        if not isinstance(current_state, ResizingState):
            return
        print("the worker group changes its size: its workers save and leave", flush=True)
        try:
            folder = RunFolder.open(self._storage.path, self._run, self._storage.endpoint)
            self._await_leaving(folder)
        except OSError as error:
            # What is raised here would end the run.
            print(f"the workers could not be asked to save: {error}", flush=True)

    def _await_leaving(self, folder: RunFolder) -> None:
        """Return when all workers have left, or one has failed; one that hangs is seen as failed in time."""
        asked, is_said = 0, False
        while True:
            status = self._group.poll_status(timeout=POLL_S)
            if status.errors:
                lines = failures.record(folder, self._attempt, status.errors)
                print("\n".join(lines), flush=True)
            if status.errors or status.finished:
                return
            try:
                # A group that has just been started claims the folder a little later.
                group = newest_group(folder, self._attempt)
                if group != asked:
                    folder.write(folder.stop(self._attempt, group), "")
                    asked = group
            except OSError as error:
                # A bucket may be away for a while: the workers train on until they can be asked.
                if not is_said:
                    print(f"the workers cannot be asked to save yet: {error}", flush=True)
                is_said = True
            time.sleep(POLL_S)
