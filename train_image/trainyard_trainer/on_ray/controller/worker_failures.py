"""Record and print the failures of workers.

The controller imports this module, which must not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray.train

from trainyard_trainer.config.storage import Storage
from trainyard_trainer.errors import StorageError
from trainyard_trainer.on_ray.controller.hanging import EndHangingWorkers
from trainyard_trainer.on_ray.controller.replace_or_restart import ReplaceOrRestart
from trainyard_trainer.run_folder import failures
from trainyard_trainer.run_folder.folder import RunFolder


class RecordFailures(ray.train.UserCallback):
    """A callback of Ray Train's controller that records and prints the failures of workers."""

    def __init__(
        self,
        storage: Storage,
        run: str,
        attempt: int,
        watch: EndHangingWorkers,
        replacer: ReplaceOrRestart | None = None,
    ) -> None:
        """`watch` knows which workers hung, and `replacer` how often lost workers were replaced."""
        self._watch = watch
        self._replacer = replacer
        self._storage = storage
        self._run = run
        self._attempt = attempt

    def after_exception(
        self, run_context: Any, worker_exceptions: Mapping[int, BaseException]
    ) -> None:
        hung = {r: e for r, e in self._watch.ended.items() if r in worker_exceptions}
        try:
            folder = RunFolder.open(self._storage.path, self._run, self._storage.endpoint)
            generation = self._replacer.replacements if self._replacer else 0
            errors = {**worker_exceptions, **hung}
            lines = failures.record(folder, self._attempt, errors, generation)
        except StorageError as error:
            # An exception in a callback would end the run.
            lines = [f"a failure of workers could not be recorded: {error.problem}"]
        print("\n".join(lines), flush=True)
