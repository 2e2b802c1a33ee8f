"""`run_config` for the user's Ray Train code: the run's name, storage and failure handling, and its progress.

    from trainyard_trainer import run_config
    trainer = ray.train.torch.TorchTrainer(train_func, run_config=run_config(), ...)

Ray Train then stores its checkpoints in the run's folder: a retry resumes from the last reported checkpoint,
which `ray.train.get_checkpoint()` returns. Reported metrics are the run's progress, and are stored in
metrics.jsonl.
"""

from __future__ import annotations

import json
import os
from typing import Any

import ray.train

from trainyard_trainer.config.storage import Storage
from trainyard_trainer.on_ray.replacement import ReplacementLimit
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.progress import cleaned


def run_config(**others: Any) -> ray.train.RunConfig:
    """Return the `ray.train.RunConfig` of this run, with other fields as given; outside of a run Ray's
    defaults."""
    if "TRAINYARD_RUN" not in os.environ:
        return ray.train.RunConfig(**others)
    name, storage = os.environ["TRAINYARD_RUN"], os.environ["TRAINYARD_STORAGE"]
    failures = int(os.environ["TRAINYARD_WORKER_FAILURES"])
    attempt = int(os.environ["TRAINYARD_ATTEMPT"])
    settings = {
        "name": name,
        "storage_path": storage,
        "failure_config": ray.train.FailureConfig(max_failures=failures),
    }
    limit = ReplacementLimit(float(os.environ["TRAINYARD_REPLACEMENT_TIMEOUT_S"]))
    callbacks = [*others.pop("callbacks", []), ReportRecorder(name, storage, attempt), limit]
    return ray.train.RunConfig(**{**settings, **others}, callbacks=callbacks)


class ReportRecorder(ray.train.UserCallback):
    """Writes what rank 0 reports to metrics.jsonl and progress.json. It runs in Ray Train's controller."""

    def __init__(self, name: str, storage: str, attempt: int) -> None:
        self._name = name
        self._storage = storage
        self._attempt = attempt
        self._count = 0

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
    ) -> None:
        self._count += 1
        record = {"attempt": self._attempt, "reports": self._count, "metrics": cleaned(metrics[0])}
        line = json.dumps(record, default=str)
        storage = Storage.of_uri(self._storage)
        try:
            folder = RunFolder.open(storage.path, self._name, storage.endpoint)
            folder.append(folder.metrics, line + "\n")
            folder.write(folder.progress, line, is_durable=False)
        except OSError as error:
            # An exception here would end the run.
            print(f"a report could not be written: {error}", flush=True)
