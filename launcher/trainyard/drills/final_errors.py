"""Errors that a retry cannot cure: what a run that has one costs until it has failed.

Such a drill injects nothing. The run file itself has the error, and the run must fail on its first cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainyard.cluster.cluster import Cluster
from trainyard.cluster.kuberay import RayjobApi
from trainyard.drills.drill import clear_folder, left_behind, left_in_folder
from trainyard.drills.drill_run import DrillJob, DrillRecorder, Say
from trainyard.drills.timeline import PodLife
from trainyard.platform import Platform
from trainyard.submission.run_folder.reader_pod import open_folder
from trainyard.submission.submit import delete_and_wait, submit_rayjob
from trainyard.submission.watch import cancelling_retries, watch_submission
from trainyard_trainer.run_files import names

ANSWER = "the run has failed at once: its retries are cancelled"
"""What happens after the error."""

ACTOR = "trainer, `submit`"
"""The components that end the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinalError:
    """An error that a retry cannot cure."""

    name: str
    fault: str
    """The description of the error."""
    settings: Sequence[str]
    """The keys of the run file that lead to the error."""
    says: str
    """A part of the error's message."""


FINAL_ERRORS: Mapping[str, FinalError] = {
    error.name: error
    for error in (
        FinalError(
            name="final-config",
            fault="the run file names a data set that does not exist",
            settings=("data.source=/no-such-data",),
            says="no-such-data",
        ),
        FinalError(
            name="final-nan",
            fault="the loss becomes NaN",
            settings=("train.optimizer={name: sgd, learning_rate: 1.0e+30}",),
            says="NaN",
        ),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FinalErrorReport:
    """What a run with a final error has cost."""

    scenario: str
    run: str
    phase: str
    message: str
    """The error in the run's folder; that of the RayJob if the folder has none."""
    clusters: int
    """The number of RayClusters whose pods were seen."""
    pods: int
    """The number of their Ray pods."""
    held_s: float
    """The seconds from the creation of each pod until it was gone or the run had failed, added up."""
    ended_s: float
    """The seconds from the submission until the run had failed."""
    left_behind: Sequence[str]
    missed: Sequence[str] = ()
    """The limits that were not met, as sentences."""

    @property
    def is_passed(self) -> bool:
        """Whether the run has failed with its error, and on one cluster."""
        return not self.missed

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return asdict(self) | {"is_passed": self.is_passed}


def pod_seconds(pods: Iterable[PodLife], until: float) -> float:
    """Add up the seconds for which pods were held, up to a time."""
    ends = ((pod, until if pod.gone is None else min(pod.gone, until)) for pod in pods)
    return sum(max(end - pod.created, 0.0) for pod, end in ends)


def missed_by(report: FinalErrorReport, error: FinalError) -> tuple[str, ...]:
    """Return the limits that a run with a final error did not meet, as sentences."""
    found = []
    if report.phase != "failed":
        found.append(f"the run has {report.phase}, although it has an error")
    elif error.says not in report.message:
        found.append(f"the run has failed with another error: {report.message}")
    if report.clusters != 1:
        found.append(f"{report.clusters} clusters were made, not 1")
    if report.left_behind:
        found.append(f"left behind: {', '.join(report.left_behind)}")
    return tuple(found)


def run_final_error(
    cluster: Cluster,
    platform: Platform,
    job: DrillJob,
    error: FinalError,
    *,
    keep: bool,
    say: Say,
) -> FinalErrorReport:
    """Submit a run with a final error, watch it as `submit` does until it has failed, and delete it."""
    rayjobs = RayjobApi(cluster)
    clear_folder(cluster, platform, job.run, keep=keep)
    recorder = DrillRecorder.of(cluster, job.run)
    began = recorder.now()
    submit_rayjob(rayjobs, job.rayjob, lambda: None)
    say(f"RayJob {cluster.namespace}/{job.name} created; waiting for it to fail")
    try:
        watched = watch_submission(cluster, job.name, job.run)
        *_, last = cancelling_retries(cluster, job.name, watched)
        over = recorder.now()
    finally:
        delete_and_wait(rayjobs, job.name)
    left = left_behind(cluster, job.run, recorder.clusters)
    with open_folder(cluster, platform, job.run) as folder:
        left += left_in_folder(folder)
        summary = json.loads(folder.read(names.SUMMARY) or "{}")
        if not keep:
            folder.delete()
    pods = list(recorder.pods.values())
    report = FinalErrorReport(
        scenario=error.name,
        run=job.run,
        phase=last.phase,
        message=summary.get("error") or last.message,
        clusters=len(recorder.clusters - {""}),
        pods=len(pods),
        held_s=round(pod_seconds(pods, over), 1),
        ended_s=round(over - began, 1),
        left_behind=left,
    )
    return replace(report, missed=missed_by(report, error))
