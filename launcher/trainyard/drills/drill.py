"""One drill: submit a run, inject a fault at a step, follow the run to its end, and report the cost."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from trainyard.cluster.cluster import Cluster
from trainyard.cluster.kuberay import RayjobApi
from trainyard.drills.drill_run import DrillJob, DrillRecorder, DrillRun, Say
from trainyard.drills.report import DrillReport, missed
from trainyard.drills.scenarios import Scenario
from trainyard.drills.strikes import Target
from trainyard.drills.timeline import (
    RecordedRun,
    observations_around,
    recover,
    stood_still_s,
    was_training_after,
)
from trainyard.drills.undisturbed import UNDISTURBED, FolderReader
from trainyard.errors import ClusterError, ConfigError
from trainyard.labels import RUN_LABEL
from trainyard.platform import Platform
from trainyard.submission.run_folder.reader_pod import open_folder
from trainyard.submission.run_folder.remote_folder import RemoteFolder
from trainyard.submission.status import RunStatus
from trainyard.submission.submit import delete_and_wait, submit_rayjob
from trainyard_trainer.config.trainer_config import RUN_NAME_LIMIT
from trainyard_trainer.run_files import lease, names

Object = dict[str, Any]

EVERY_S = 5.0
"""The interval of checkpoints in a drill, in seconds."""

SETTINGS = (
    *(f"checkpoint.every_s={EVERY_S:g}", "checkpoint.every_epochs=1000000"),
    "train.early_stopping=null",
)
"""The settings of a drill's run: checkpoints every few seconds, and no early stopping."""

STRIKE_AT = (0.25, 0.55)
"""The range, as fractions of the run's steps, from which the step of the fault is drawn."""

GONE_LIMIT_S = 120.0
"""The time in seconds that Kubernetes has to delete the objects of a deleted run."""

POLL_S = 1.0
"""The interval in seconds at which remaining objects are listed."""

LONGER_OR_EARLIER = (
    "Train more epochs (--set train.epochs=N), or inject the fault earlier (--at-step N)."
)


def drill_name(run: str, scenario: str) -> str:
    """Return the name of a drill's run, `<run>-drill-<scenario>`. Long names are truncated."""
    suffix = f"-{scenario}" if scenario == UNDISTURBED else f"-drill-{scenario}"
    return run[: RUN_NAME_LIMIT - len(suffix)].rstrip("-") + suffix


def run_drill(
    cluster: Cluster,
    platform: Platform,
    job: DrillJob,
    scenario: Scenario,
    *,
    weights: str | None,
    at_step: int | None = None,
    keep: bool = False,
    say: Say,
) -> DrillReport:
    """Submit the run, inject the fault, follow the run to its end, delete it, and return the report.

    Without `at_step`, the step is random; without `weights`, no weights are compared. Raises ConfigError if
    the run ends before the fault is injected.
    """
    rayjobs = RayjobApi(cluster)
    clear_folder(cluster, platform, job.run, keep=keep)
    recorder = DrillRecorder.of(cluster, job.run)
    submit_rayjob(rayjobs, job.rayjob, lambda: None)
    say(f"RayJob {cluster.namespace}/{job.name} created; waiting for it to train")
    drill_run = DrillRun(cluster, platform, job, recorder, say)
    try:
        strike_result = strike_once(drill_run, scenario, at_step)
    finally:
        delete_and_wait(rayjobs, job.name)
    last = strike_result.last
    left = left_behind(cluster, job.run, recorder.clusters)
    with open_folder(cluster, platform, job.run) as folder:
        records = read_records(folder)
        left += left_in_folder(folder)
        found = folder.sum(names.MODEL) if last.phase == "succeeded" else None
        is_even = has_even_epochs(folder.records(names.METRICS), job.config.train.epochs)
        if not keep:
            folder.delete()
    pods = list(recorder.pods.values())
    recovery = recover(records, pods, recorder.seen, strike_result.began)
    report = DrillReport(
        scenario=scenario.name,
        run=job.run,
        is_recovered=last.phase == "succeeded",
        why_not="" if last.phase == "succeeded" else f"{last.phase}: {last.message}".rstrip(": "),
        struck_at_step=strike_result.step,
        recovery=recovery,
        attempts=len(records.attempts),
        worker_groups=records.worker_groups,
        has_equal_weights=None if weights is None or found is None else found == weights,
        is_elastic=job.config.scaling.is_elastic,
        has_even_epochs=is_even,
        left_behind=left,
        seen=observations_around(recorder.seen, strike_result.began),
        stood_still_s=round(stood_still_s(recorder.seen, strike_result.began), 1),
        outlasted=was_training_after(recorder.seen, strike_result.over),
    )
    return replace(report, missed=missed(report, scenario, job.config.checkpoint.every_s))


def has_even_epochs(metrics: Sequence[Object], epochs: int) -> bool:
    """Return whether metrics.jsonl has each epoch once, with equal numbers of steps and samples."""
    ends = [each for each in metrics if each["kind"] == "epoch"]
    return len(ends) == epochs and all(
        each[key] == number * ends[0][key]
        for number, each in enumerate(ends, 1)
        for key in ("epoch", "step", "samples")
    )


def clear_folder(cluster: Cluster, platform: Platform, run: str, *, keep: bool) -> None:
    """Rename the folder of an earlier drill, and delete it unless `keep` is set."""
    with open_folder(cluster, platform, run) as folder:
        if (aside := folder.set_aside()) is not None and not keep:
            folder.sibling(aside).delete()


def read_records(folder: RemoteFolder) -> RecordedRun:
    """Read the records of attempts, starts and failures from a run's folder."""
    return RecordedRun(
        attempts=folder.records(names.ATTEMPTS),
        starts=folder.records(names.STARTS),
        failures=folder.records(names.FAILURES),
        replacements=folder.records(names.REPLACEMENTS),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StrikeResult:
    """The time of a fault and the end of the run. Times are by the clock of the run's pods."""

    step: int
    began: float
    over: float
    last: RunStatus
    """The status of the run at its end."""


def strike_once(drill_run: DrillRun, scenario: Scenario, at_step: int | None) -> StrikeResult:
    """Follow a run to its end, and inject the fault at its step."""
    last: RunStatus | None = None
    locate_target: Future[Target] | None = None
    struck, step = 0.0, 0
    over: list[float] = []
    with ThreadPoolExecutor(1) as threads:
        for run_status in drill_run.statuses():
            last = run_status
            if run_status.progress is None or drill_run.strike is not None:
                continue
            step = int(run_status.progress["step"])
            if at_step is None:
                at_step = round(random.uniform(*STRIKE_AT) * run_status.progress["steps"])
            # Pods and processes are located ahead of the step, because this takes a second.
            workers = drill_run.job.config.scaling.num_workers
            if locate_target is None and has_all_at_work(run_status.progress, workers):
                locate_target = threads.submit(drill_run.locate_target)
            if locate_target is not None and locate_target.done() and step >= at_step:
                target = locate_target.result()
                drill_run.say(f"fault at step {step}: {scenario.fault}")
                struck = drill_run.recorder.now()
                drill_run.strike = threads.submit(scenario.strike, target)
                drill_run.strike.add_done_callback(lambda _: over.append(drill_run.recorder.now()))
        if drill_run.strike is None or last is None:
            raise ConfigError(
                f"run {drill_run.job.run} ended before the fault could be injected"
                + ("" if at_step is None else f" at step {at_step}"),
                LONGER_OR_EARLIER,
            )
    is_too_late = last.phase == "succeeded" and not was_training_after(
        drill_run.recorder.seen, over[0]
    )
    require_landed(drill_run.strike, drill_run.job.run, is_too_late=is_too_late)
    return StrikeResult(step=step, began=struck, over=over[0], last=last)


def require_landed(strike: Future[None], run: str, *, is_too_late: bool) -> None:
    """Raise the error of an injected fault, or ConfigError if the run succeeded before the fault was over."""
    try:
        strike.result()
    except ClusterError as error:
        if not is_too_late:
            raise
        raise ConfigError(
            f"run {run} ended before the fault was over",
            error.what,
            *error.details,
            LONGER_OR_EARLIER,
        ) from error


def has_all_at_work(progress: Object, workers: int) -> bool:
    """Return whether all workers train. An elastic run may have fewer at first.

    Before the first step, the progress contains the planned number of workers.
    """
    return bool(progress["step"] > 0 and progress["workers"] == workers)


def left_behind(cluster: Cluster, run: str, ray_clusters: set[str]) -> list[str]:
    """Wait until the objects of a deleted run are gone, and return those that remain after a time limit."""
    deadline = time.monotonic() + GONE_LIMIT_S
    while True:
        left = [
            f"{kind} {each['metadata']['name']}"
            for kind in ("Pod", "RayCluster")
            for each in cluster.list(kind, {RUN_LABEL: run})
        ]
        left += [f"Secret {name}" for name in ray_clusters if name and cluster.get("Secret", name)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(POLL_S)


def left_in_folder(folder: FolderReader) -> list[str]:
    """Return what must not be in the folder of an ended run: unfinished files or an unreleased lease."""
    files = folder.files()
    left = [file for file in files if file.endswith(".aside")]
    attempts = lease.attempts_of(files)
    if attempts and lease.ended_file(attempts[-1]) not in files:
        left.append(f"the lease of attempt {attempts[-1]}")
    return left
