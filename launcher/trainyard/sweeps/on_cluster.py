"""Run a sweep on a cluster: check all runs, keep a few of them active, and collect their outcomes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from trainyard.api import upload_of
from trainyard.cluster.cluster import Cluster
from trainyard.cluster.follow import TRANSIENT, Patience, follow
from trainyard.cluster.kuberay import RayjobApi
from trainyard.errors import ClusterError, ClusterUnreachable, ConfigError, LauncherError
from trainyard.labels import OWNER_LABELS, RUN_LABEL
from trainyard.planning.merge import with_source
from trainyard.planning.objects import run_objects
from trainyard.platform import Platform
from trainyard.run_file.code.code_archive import Overlay
from trainyard.run_file.code.source import GitState
from trainyard.submission.current_status import current_status, head_pod
from trainyard.submission.run_folder.reader_pod import open_folder
from trainyard.submission.status import ENDED, phase_of, run_status_of
from trainyard.submission.submit import find_same_submission, submit_rayjob
from trainyard.sweeps.combinations import Combination, naming
from trainyard.sweeps.outcomes import Goal, SweepOutcome, completed, has_trained, outcome_text
from trainyard.sweeps.schedule import PhaseChange, SweepSchedule

Object = dict[str, Any]
T = TypeVar("T")
Say = Callable[[str], None]
UploadListener = Callable[[str], Callable[[int, int], object]]
"""A function that returns a callback for the progress of a run's upload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRun:
    """A run that is ready to be submitted."""

    job: Object
    """The RayJob of the run."""
    config: Object
    """The config of its trainer."""
    upload: Callable[[], None] | None
    """A function that uploads the code to the run's folder; None if the RayJob contains the code."""


def train_on_cluster(
    cluster: Cluster,
    platform: Platform,
    combinations: Sequence[Combination],
    goal: Goal,
    max_parallel: int,
    say: Say,
    on_upload: UploadListener,
    source: GitState | None = None,
) -> Mapping[str, SweepOutcome]:
    """Train all combinations and return the outcome of each run.

    All runs are planned and checked before the first one is submitted. Raises ConfigError or ClusterError if
    one of them cannot be submitted.
    """
    prepared_runs = _prepare_runs(cluster, platform, combinations, say, on_upload, source)
    others = _other_submissions(RayjobApi(cluster), prepared_runs, combinations)
    recorder = OutcomeRecorder(cluster, platform, combinations, goal, say)
    recorder.note_trained_before(others, prepared_runs)
    sweep = SweepSchedule(
        [run for run in prepared_runs if run not in recorder.outcomes], max_parallel
    )
    say(f"sweep of {len(prepared_runs)} runs, at most {max_parallel} at the same time")
    try:
        carry_out(cluster, sweep, prepared_runs, recorder)
    except KeyboardInterrupt:
        say(
            f"detached: {len(sweep.live)} runs continue (`trainyard list {cluster.options}`), "
            f"{len(sweep.waiting)} were not submitted; the same command resumes the sweep"
        )
        raise
    recorder.complete()
    return recorder.outcomes


def _prepare_runs(
    cluster: Cluster,
    platform: Platform,
    combinations: Sequence[Combination],
    say: Say,
    on_upload: UploadListener,
    source: GitState | None,
) -> Mapping[str, PreparedRun]:
    """Plan and render all runs, and print the warnings. Return the runs by their names."""
    codes: dict[str, Overlay] = {}  # shared, because most runs have the same code
    found = {}
    for combination in combinations:
        name = combination.name
        with naming(combination):
            objects = run_objects(combination.run, platform, cluster.namespace)
        for warning in objects.warnings:
            say(f"warning: {warning}")
        code = objects.plan.code
        if code is not None:
            code = codes.setdefault(code.sha256, code)
        found[name] = PreparedRun(
            job=with_source(objects.job, source),
            config=objects.plan.trainer.model_dump(mode="json"),
            upload=upload_of(cluster, platform, name, code, on_upload(name)),
        )
    return found


def _other_submissions(
    rayjobs: RayjobApi,
    prepared_runs: Mapping[str, PreparedRun],
    combinations: Sequence[Combination],
) -> list[str]:
    """Return the runs that have succeeded with another RayJob, such as one with other epochs.

    Raises ConfigError or ClusterError if a run cannot be submitted.
    """
    phases: dict[str, dict[str, str]] = {}
    for job in rayjobs.list_jobs():
        phase = phase_of(job.get("status", {}))
        phases.setdefault(job["metadata"]["labels"][RUN_LABEL], {})[job["metadata"]["name"]] = phase
    found = []
    for combination in combinations:
        its = phases.get(combination.name)
        if its is None:
            continue
        job = prepared_runs[combination.name].job
        with naming(combination):
            find_same_submission(rayjobs, job, is_fresh=False)
        if "succeeded" in its.values() and job["metadata"]["name"] not in its:
            found.append(combination.name)
    return found


def carry_out(
    cluster: Cluster,
    sweep: SweepSchedule,
    prepared_runs: Mapping[str, PreparedRun],
    recorder: OutcomeRecorder,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Submit the runs of a sweep as they become due, and follow them until all have ended.

    One watch on all RayJobs of trainyard reports the changes of every run. After each submission the watch
    starts again with a list, so that it does not report states that are older than the submission. Raises
    ClusterUnreachable if the cluster is unreachable for too long.
    """
    rayjobs = RayjobApi(cluster)
    runs = {its.job["metadata"]["name"]: run for run, its in prepared_runs.items()}
    while not sweep.is_over:
        for state in follow(cluster, "RayJob", OWNER_LABELS, clock=clock, sleep=sleep):
            there = {runs[name]: job for name, job in state.items() if name in runs}
            phases = {run: phase_of(job.get("status", {})) for run, job in there.items()}
            for change in sweep.update(phases):
                recorder.update(change, there.get(change.run))
            if sweep.due or sweep.is_over:
                break
        for run in sweep.due:
            try:
                its = prepared_runs[run]
                send = partial(submit_rayjob, rayjobs, its.job, upload=its.upload)
                how = patiently(send, clock, sleep)
            except ClusterUnreachable:
                raise
            except (ClusterError, ConfigError) as error:
                sweep.refuse(run)
                recorder.note_refused(run, error)
            else:
                sweep.submit(run)
                recorder.note_submitted(run, how)


def patiently(
    ask: Callable[[], T],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Retry a request while the cluster is unreachable. Raises ClusterError after the time limit."""
    patience = Patience(clock, sleep)
    patience.answered()  # the cluster has answered before
    while True:
        try:
            return ask()
        except ClusterError as error:
            if not isinstance(error, ClusterUnreachable) and error.reason not in TRANSIENT:
                raise
            patience.wait(error)


class OutcomeRecorder:
    """Log and store the outcomes of the runs.

    The status of the RayJob shows how a run has ended. Its metrics are in the last lines of the head's log,
    which are read when the run ends: the platform keeps the head for some minutes, and reading its log
    needs no other rights than `watch`. Metrics that the log lacks are read from the run's folder: from the
    run's head if it still exists, or else from one reader pod for all such runs, after the last run has
    ended.
    """

    def __init__(
        self,
        cluster: Cluster,
        platform: Platform,
        combinations: Sequence[Combination],
        goal: Goal,
        say: Say,
    ) -> None:
        self.outcomes: dict[str, SweepOutcome] = {}
        self._cluster = cluster
        self._platform = platform
        self._goal = goal
        self._print = say
        self._words = {combination.name: str(combination) for combination in combinations}

    def note_submitted(self, run: str, how: str) -> None:
        """Log that a run was submitted."""
        words = {"created": "submitted", "resubmitted": "submitted again"}
        self._say(run, words.get(how, "already active"))

    def note_refused(self, run: str, error: LauncherError) -> None:
        """Record that a run could not be submitted."""
        self.outcomes[run] = SweepOutcome(phase="failed", message=f"not submitted: {error.what}")
        self._say(run, self.outcomes[run].message)

    def update(self, change: PhaseChange, job: Object | None) -> None:
        """Log a change of a run's phase, and record the outcome of a run that has ended."""
        if change.after in ENDED:
            self.outcomes[change.run] = outcome = self._ended(change, job)
            self._say(
                change.run, outcome_text(outcome, self._goal, is_new=change.before is not None)
            )
        elif change.before is None:
            self._say(change.run, f"already active ({change.after})")
        elif change.after in ("running", "retrying", "suspended"):
            self._say(change.run, change.after)

    def note_trained_before(
        self, runs: Sequence[str], prepared_runs: Mapping[str, PreparedRun]
    ) -> None:
        """Record the outcomes of those runs that were already trained with the same config."""
        if not runs:
            return
        with open_folder(self._cluster, self._platform, runs[0]) as first:
            for run in runs:
                folder = first.sibling(run)
                if has_trained(folder, prepared_runs[run].config):
                    outcome = completed(SweepOutcome(phase="succeeded"), folder)
                    self.outcomes[run] = outcome
                    self._say(run, outcome_text(outcome, self._goal, is_new=False))

    def complete(self) -> None:
        """Read the missing metrics of the runs that have succeeded from their folders."""
        runs = [run for run, outcome in self.outcomes.items() if outcome.is_incomplete]
        if not runs:
            return
        try:
            with open_folder(self._cluster, self._platform, runs[0]) as first:
                for run in runs:
                    folder = first.sibling(run)
                    self.outcomes[run] = completed(self.outcomes[run], folder)
        except ClusterError as error:
            self._print(f"the metrics of {len(runs)} runs could not be read: {error.what}")

    def _ended(self, change: PhaseChange, job: Object | None) -> SweepOutcome:
        if job is None:
            return SweepOutcome(phase=change.after, message="its RayJob was deleted")
        run_status = run_status_of(job)
        outcome = SweepOutcome(phase=run_status.phase, message=run_status.message)
        try:
            run_status = patiently(partial(current_status, self._cluster, job))
            outcome = SweepOutcome(
                phase=run_status.phase,
                message=run_status.message,
                progress=run_status.progress,
                summary=run_status.summary,
            )
            ray_cluster = job.get("status", {}).get("rayClusterName", "")
            head = head_pod(self._cluster, ray_cluster) if outcome.is_incomplete else None
            if head is not None:
                with open_folder(self._cluster, self._platform, change.run, head) as folder:
                    outcome = completed(outcome, folder)
        except ClusterUnreachable:
            raise
        except ClusterError:
            return outcome  # `complete` reads its folder later
        return outcome

    def _say(self, run: str, words: str) -> None:
        self._print(f"{run} ({self._words[run]}): {words}")
