"""Record and print the failures of workers.

The controller imports this module, which must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray.train

from trainyard_trainer.config.storage import Storage
from trainyard_trainer.errors import StorageError
from trainyard_trainer.on_ray.controller.replace_or_restart import ReplaceOrRestart
from trainyard_trainer.run_folder import failures
from trainyard_trainer.run_folder.folder import RunFolder


class RecordFailures(ray.train.UserCallback):
    """A callback of Ray Train's controller that records and prints the failures of workers."""

    def __init__(
        self, storage: Storage, run: str, attempt: int, replacer: ReplaceOrRestart | None = None
    ) -> None:
        """`replacer` knows how often lost workers were replaced."""
        self._replacer = replacer
        self._storage = storage
        self._run = run
        self._attempt = attempt

    def after_exception(
        self, run_context: Any, worker_exceptions: Mapping[int, BaseException]
    ) -> None:
        try:
            folder = RunFolder.open(self._storage.path, self._run, self._storage.endpoint)
            generation = self._replacer.replacements if self._replacer else 0
            lines = failures.record(folder, self._attempt, worker_exceptions, generation)
        except StorageError as error:
            # An exception in a callback would end the run.
            lines = [f"a failure of workers could not be recorded: {error.problem}"]
        print("\n".join(lines), flush=True)
