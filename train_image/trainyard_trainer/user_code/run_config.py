"""`run_config()` for Ray Train code of the user: sets the run's name, storage and failure handling.

    from trainyard_trainer import run_config
    trainer = ray.train.torch.TorchTrainer(train_func, run_config=run_config(), ...)

Ray Train then stores its checkpoints in the run's folder: a retry resumes from the last reported checkpoint,
which `ray.train.get_checkpoint()` returns. Reported metrics are the run's progress, and are stored in
metrics.jsonl. The log of each worker is kept there, too.
"""

from __future__ import annotations

import json
import os
from typing import Any

import ray.train

from trainyard_trainer.config.storage import Storage
from trainyard_trainer.on_ray.controller.replacement import ReplacementLimit
from trainyard_trainer.on_ray.controller.worker_logs import KeepWorkerLogs
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.user_code.reported_metrics import to_json_values


def run_config(**others: Any) -> ray.train.RunConfig:
    """Return the `ray.train.RunConfig` of this run. `others` are further fields of `ray.train.RunConfig`.

    Outside of a run, it has Ray's defaults.
    """
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
    logs = KeepWorkerLogs(Storage.of_uri(storage), name, attempt, writes_workers=True)
    callbacks = [*others.pop("callbacks", []), ReportRecorder(name, storage, attempt), limit, logs]
    return ray.train.RunConfig(**{**settings, **others}, callbacks=callbacks)


class ReportRecorder(ray.train.UserCallback):
    """Ray Train callback that writes the metrics of rank 0 to metrics.jsonl and progress.json."""

    def __init__(self, name: str, storage: str, attempt: int) -> None:
        self._name = name
        self._storage = storage
        self._attempt = attempt
        self._count = 0

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
    ) -> None:
        self._count += 1
        reported = to_json_values(metrics[0])
        record = {"attempt": self._attempt, "reports": self._count, "metrics": reported}
        line = json.dumps(record)
        storage = Storage.of_uri(self._storage)
        try:
            folder = RunFolder.open(storage.path, self._name, storage.endpoint)
            folder.append(folder.metrics, line + "\n")
            folder.write(folder.progress, line, is_durable=False)
        except OSError as error:
            # An exception in a callback would end the run.
            print(f"reported metrics could not be written: {error}", flush=True)
