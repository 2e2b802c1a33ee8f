"""Keep the log of each Ray Train worker in the run's folder, whatever code it runs.

Ray Train's controller has the callback; `run_folder.worker_log` describes the files.
"""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import ray
import ray.exceptions
from ray.train.v2._internal.execution.callback import ReplicaGroupCallback, WorkerGroupCallback

from trainyard_trainer.config.storage import Storage
from trainyard_trainer.errors import StorageError
from trainyard_trainer.run_files.names import WorkerLogName
from trainyard_trainer.run_folder import worker_log
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.run_record import WorkerFacts
from trainyard_trainer.run_folder.worker_log import WorkerLog

START_S = 60.0
"""For how many seconds the workers may take to begin with their logs; without an answer the run goes on."""

END_S = 3.0
"""For how many seconds workers may take to copy the rest of their logs before they are ended. Those of a lost
node do not answer, and the next worker group waits for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedWorker:
    """What a worker must know to keep its log."""

    storage: Storage
    run: str
    name: WorkerLogName
    world_size: int
    continues: bool
    """Whether the worker continues the log of a lost one."""


class KeepWorkerLogs(WorkerGroupCallback, ReplicaGroupCallback):
    """Has each worker keep its log, and writes down where the workers of the user's code run."""

    def __init__(self, storage: Storage, run: str, attempt: int, *, writes_workers: bool) -> None:
        """`writes_workers` is for code of the user: workers of a recipe write workers.json themselves."""
        self._storage = storage
        self._run = run
        self._attempt = attempt
        self._writes_workers = writes_workers
        self._errors: dict[int, str] = {}
        self._group, self._world_size = 0, 0

    def after_worker_group_start(self, worker_group: Any) -> None:
        self._errors, self._group = {}, 0
        try:
            folder = RunFolder.open(self._storage.path, self._run, self._storage.endpoint)
            group = self._group = worker_log.begin_group(folder, self._attempt)
            workers = worker_group.get_workers()
            self._world_size = len(workers)
            begun = [
                worker.execute_async(begin_log, self._logged(worker, group)) for worker in workers
            ]
            places = ray.get(begun, timeout=START_S)
            if self._writes_workers:
                document = {"attempt": self._attempt, "workers": places}
                folder.write(folder.workers, json.dumps(document), is_durable=False)
        except (
            StorageError,
            ray.exceptions.RayTaskError,
            ray.exceptions.GetTimeoutError,
        ) as error:
            # It would end the run. Of a lost worker (RayActorError) Ray Train itself takes care.
            print(f"the logs of workers are not kept: {error}", flush=True)

    def after_replica_group_start(self, replica_group: Any) -> None:
        if not self._group:
            return
        for worker in replica_group.get_workers():
            self._errors.pop(rank_of(worker), None)
            # The other workers wait for this one to train: its log begins beside that.
            worker.execute_async(begin_log, self._logged(worker, self._group, continues=True))

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        self._errors |= {
            rank: error_text(error) for rank, error in worker_group_status.errors.items()
        }

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        ended = [
            worker.execute_async(end_log, self._errors.get(rank_of(worker), ""))
            for worker in worker_group.get_workers()
        ]
        # Those that are dead already answer with an error at once.
        ray.wait(ended, num_returns=len(ended), timeout=END_S)

    def _logged(self, worker: Any, group: int, *, continues: bool = False) -> LoggedWorker:
        return LoggedWorker(
            storage=self._storage,
            run=self._run,
            name=WorkerLogName(self._attempt, group, rank_of(worker)),
            world_size=self._world_size,
            continues=continues,
        )


def rank_of(worker: Any) -> int:
    """Return the rank of a worker of Ray Train's worker group."""
    rank: int = worker.distributed_context.world_rank
    return rank


def error_text(error: BaseException) -> str:
    """Return the error of a worker with its traceback, which Ray Train sends to the controller alone."""
    cause = getattr(error, "_base_exc", error)
    told = getattr(error, "_traceback_str", None)
    return told or "".join(traceback.format_exception(cause))


# In the workers.

_log: WorkerLog | None = None
"""The log of this worker process."""


def begin_log(worker: LoggedWorker) -> dict[str, Any]:
    """Begin to keep the log of this process; return where it runs."""
    global _log
    folder = RunFolder.open(worker.storage.path, worker.run, worker.storage.endpoint)
    interval_s = worker_log.interval_s(worker.world_size)
    _log = WorkerLog(
        folder,
        str(worker.name),
        worker_log.own_streams(),
        interval_s=interval_s,
        # The workers of a group write one after the other.
        first_s=interval_s * (worker.name.rank + 1) / worker.world_size,
        limit=worker_log.limit_bytes(worker.world_size),
        continues=worker.continues,
    )
    context = ray.get_runtime_context()
    return asdict(
        WorkerFacts.here(
            worker.name.rank,
            ray_worker=context.get_worker_id(),
            ray_node=context.get_node_id(),
            gpu=None,
        )
    )


def end_log(last_words: str) -> None:
    """Copy the rest of this process' log, with the error that ended its work."""
    if _log is not None:
        _log.end(last_words)
