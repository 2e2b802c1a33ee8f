"""Run the workers of a built-in recipe with Ray Train.

The module connects to Ray, starts worker groups until the run ends, passes Ray's drain notices on to the
workers, and publishes how long ago the newest step was.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

from trainyard_trainer.on_ray.ray_cluster import (  # first: Ray reads some variables when it is imported
    ray_running,
    require_room,
    worker_resources,
)
from trainyard_trainer.run_files.driver_output import STOPPED

# isort: split
import ray
import ray.exceptions
import ray.train

from trainyard_trainer.attempt import attempt
from trainyard_trainer.config.kept_state import NOT_KEPT, keeps_state, why_not_kept
from trainyard_trainer.config.replaceable import NOT_REPLACED, replaces_workers, why_not_replaced
from trainyard_trainer.config.trainer_config import RecipeConfig, TrainerConfig
from trainyard_trainer.engine.outcome import Outcome
from trainyard_trainer.engine.task import AnyTask, TrainingTask
from trainyard_trainer.errors import RunError
from trainyard_trainer.on_ray.controller.final_errors import EndOnFinalError, final_error
from trainyard_trainer.on_ray.controller.hanging import EndHangingWorkers
from trainyard_trainer.on_ray.controller.placement_groups import GiveBackPlaces
from trainyard_trainer.on_ray.controller.process_group import LeanTrainer, ProcessGroup
from trainyard_trainer.on_ray.controller.replace_or_restart import (
    PLACE_S,
    ReplaceOrRestart,
    WatchDrains,
)
from trainyard_trainer.on_ray.controller.replaceable_group import ReplaceableGroup
from trainyard_trainer.on_ray.controller.replacement import (
    START_VARIABLE,
    NotReplaced,
    ReplacementLimit,
)
from trainyard_trainer.on_ray.controller.resize import SaveBeforeResize
from trainyard_trainer.on_ray.controller.state_keepers import KeepersOnNodes
from trainyard_trainer.on_ray.controller.worker_failures import RecordFailures
from trainyard_trainer.on_ray.controller.worker_logs import KeepWorkerLogs
from trainyard_trainer.on_ray.coordinator import start_coordinator
from trainyard_trainer.on_ray.gauges import published_step_age
from trainyard_trainer.on_ray.node_fetch import fetch_on_nodes
from trainyard_trainer.on_ray.ray_errors import LOST, LOST_REMEDY, in_one_line
from trainyard_trainer.parallel.worker import BACKENDS
from trainyard_trainer.run_folder import failures
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.log import Output
from trainyard_trainer.run_folder.ownership.lease import Lease
from trainyard_trainer.run_folder.stop_signals import StoppedBySignal

T = TypeVar("T")

SIGNAL_POLL_S = 0.5
"""Seconds between two checks of the lease while the workers train."""

STOP_WAIT_S = 20.0
"""Seconds that workers have to save and end after SIGTERM; a pod has 30 s by default."""


def run(config: TrainerConfig, output: Output) -> None:
    """Train a run on Ray to its end. Raises TrainerError."""
    attempt.run(config, output, fit)


MakeTrainer = Callable[..., Any]
"""A function that returns Ray Train's trainer for a task, a scaling config and a run config. Its workers
return `Outcome.to_plain()`."""


def torch_trainer(task: TrainingTask, **common: Any) -> LeanTrainer:
    """Return the trainer of PyTorch workers for a task; `common` are its scaling and run config."""
    config = task.config

    # The controller does not load this function. As an argument of the trainer, it would load the task.
    def train() -> Any:
        from trainyard_trainer.on_ray.worker import train_worker

        return train_worker(task)

    group = ReplaceableGroup if replaces_workers(config) else ProcessGroup
    return LeanTrainer(
        train,
        backend_config=group(
            backend=BACKENDS["cuda" if config.scaling.use_gpu else "cpu"],
            timeout_s=config.faults.collective_timeout_s,
        ),
        **common,
    )


def fit(
    task: AnyTask, folder: RunFolder, lease: Lease, make_trainer: MakeTrainer = torch_trainer
) -> Outcome:
    """Train on Ray with `scaling.num_workers` workers."""
    with ray_running(task.config.scaling) as scratch, published_step_age(task, folder):
        task.startup.reach("ray")
        return run_in_thread(
            lambda: run_workers(task, folder, scratch, make_trainer),
            ask_to_end=lambda stopped: ask_to_stop(task, folder, stopped),
            report=lambda outcome: print(f"{STOPPED}{outcome.trained.step}", flush=True),
            check=lambda: lease.check() if lease.is_fenced else None,
        )


def ask_to_stop(task: AnyTask, folder: RunFolder, stopped: StoppedBySignal) -> None:
    """Write the file that asks the workers to save and stop; they look for it about every second."""
    print(f"{stopped.notice}: the workers save a checkpoint and leave", flush=True)
    folder.write(folder.stop(task.attempt), "")


def run_in_thread(
    work: Callable[[], T],
    *,
    ask_to_end: Callable[[StoppedBySignal], None],
    report: Callable[[T], None],
    check: Callable[[], None],
) -> T:
    """Call `work` in another thread, and wait for it in the main thread, where signals are handled.

    A signal handler raises its exception in the main thread. In the middle of Ray's own code, such an
    exception would leave Ray in an undefined state. After the first SIGTERM, `ask_to_end` is called. If the
    work then ends within STOP_WAIT_S, `report` is called with its result. An exception of `check` ends the
    wait at once.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - `outcome.result()` raises it again
            outcome.set_exception(error)

    threading.Thread(target=run, name="fit", daemon=True).start()
    # The kernel may deliver a signal to any thread. Python's handler runs in the main thread, once awake.
    try:
        while not wait([outcome], timeout=SIGNAL_POLL_S).done:
            check()
    except StoppedBySignal as stopped:
        ask_to_end(stopped)
        if wait([outcome], timeout=STOP_WAIT_S).done and outcome.exception() is None:
            report(outcome.result())
        raise
    return outcome.result()


def run_workers(
    task: AnyTask, folder: RunFolder, scratch: Path, make_trainer: MakeTrainer
) -> Outcome:
    """Run worker groups until the run has ended, on a Ray cluster that is connected already.

    Ray Train restarts a failed worker group itself. This function starts Ray Train again in two cases: the
    workers have saved and stopped because their node goes away, or a worker was lost at a moment in which Ray
    Train itself ends.
    """
    scaling, restarts_left = task.config.scaling, task.config.faults.worker_failures
    require_room(scaling)
    if task.config.faults.replace_workers and (reason := why_not_replaced(task.config)):
        print(NOT_REPLACED.format(why=reason), flush=True)
    if task.config.faults.keep_state and (reason := why_not_kept(task.config)):
        print(NOT_KEPT.format(why=reason), flush=True)
    if isinstance(task, TrainingTask):
        fetch_on_nodes(task, folder)
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    if scaling.is_elastic:
        # The seconds after which an elastic worker group that does not start is planned again. Ray counts the
        # resources of a lost node until it notices the loss.
        os.environ.setdefault(START_VARIABLE, "5")
        start_coordinator()
    # Without these limits, a worker that hangs would never be noticed.
    timeout_s = str(task.config.faults.collective_timeout_s)
    os.environ["RAY_TRAIN_COLLECTIVE_TIMEOUT_S"] = timeout_s
    os.environ["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] = timeout_s
    os.environ["RAY_TRAIN_ENABLE_PRINT_PATCH"] = "0"  # it prints each line of a worker twice
    for number in itertools.count(1):
        try:
            outcome = fit_workers(task, scratch / f"train-{number}", make_trainer)
        except (ray.train.ControllerError, ray.exceptions.RayActorError) as error:
            # A RayActorError is that of the controller's own process.
            failure = getattr(error, "controller_failure", error)
            if (final := final_error(error)) is not None:
                raise type(final)(str(final)) from error
            if isinstance(failure, NotReplaced):
                raise RunError(str(failure)) from error
            # Ray Train restarts a worker group that has lost a worker, with two exceptions: at some moments
            # of its start and end, and if Ray has killed the worker because memory was low.
            if not isinstance(failure, LOST):
                raise
            if not restarts_left:
                raise RunError(
                    f"Ray Train has ended: {in_one_line(failure)}\n       {LOST_REMEDY}"
                ) from error
            restarts_left -= 1
            print(f"a worker was lost, and Ray Train has ended: {in_one_line(failure)}", flush=True)
            continue
        if not outcome.is_stopped or folder.exists(folder.stop(task.attempt)):
            break
        print(
            f"a node goes away: its workers have left, all is saved up to step {outcome.trained.step}",
            flush=True,
        )
        failures.note_leaving(folder, task.attempt)
    return outcome


def hang_limit_s(config: RecipeConfig) -> float:
    """Return the seconds that a worker of a run may hang. One of them alone may compile its model anew."""
    faults = config.faults
    is_compiled = isinstance(config, TrainerConfig) and config.train.compile
    return max(faults.hang_timeout_s, faults.collective_timeout_s if is_compiled else 0.0)


def fit_workers(task: AnyTask, storage: Path, make_trainer: MakeTrainer) -> Outcome:
    """Run Ray Train until the run has ended, or the workers have stopped because their node goes away."""
    config, scaling = task.config, task.config.scaling
    replacer = None
    if replaces_workers(config):
        replacer = ReplaceOrRestart(min(PLACE_S, config.faults.replacement_timeout_s))
    watch = EndHangingWorkers(hang_limit_s(config))
    callbacks: list[Any] = [
        watch,
        RecordFailures(config.storage, config.name, task.attempt, watch, replacer),
        GiveBackPlaces(),
        ReplacementLimit(config.faults.replacement_timeout_s),
        EndOnFinalError(),
        KeepWorkerLogs(config.storage, config.name, task.attempt, writes_workers=False),
    ]
    if replacer:
        callbacks += [replacer, WatchDrains()]
    if keeps_state(config):
        callbacks.append(KeepersOnNodes())
    if scaling.is_elastic:
        callbacks.append(SaveBeforeResize(config.storage, config.name, task.attempt))
    # Type checkers read version 1 of Ray Train; at run time, version 2 is imported in its place.
    train: Any = ray.train
    trainer = make_trainer(
        task,
        scaling_config=train.ScalingConfig(
            num_workers=(scaling.min_workers, scaling.num_workers)
            if scaling.is_elastic
            else scaling.num_workers,
            use_gpu=scaling.use_gpu,
            resources_per_worker=worker_resources(scaling),
        ),
        run_config=train.RunConfig(
            name=f"{config.name}-a{task.attempt}",
            # A temporary folder for Ray Train's state: a run resumes from the checkpoints in its own folder.
            storage_path=str(storage),
            callbacks=callbacks,
            failure_config=train.FailureConfig(max_failures=config.faults.worker_failures),
            logging_config=train.LoggingConfig(log_level="WARNING"),
        ),
    )
    try:
        result = trainer.fit()
    except ray.train.WorkerGroupError as error:
        if (final := final_error(error)) is not None:
            raise type(final)(str(final)) from error
        rank, failure = min(error.worker_failures.items())
        cause = failures.innermost(failure)
        is_lost = isinstance(cause, LOST)
        reason = in_one_line(cause) if is_lost else f"{type(cause).__name__}: {cause}"
        raise RunError(
            f"worker {rank} failed, after {config.faults.worker_failures} restarts: {reason}"
            + (f"\n       {LOST_REMEDY}" if is_lost else "")
        ) from error
    return Outcome.from_plain(result.return_value)
