"""Names of the files in a run's folder, relative to that folder.

The trainer writes them through `run_folder.folder.RunFolder`, the launcher reads them through a pod or from a
disk. docs/reference/run-folder.md describes each one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import total_ordering

RUN = "run.json"
"""The config of the newest attempt, and the record of all attempts."""

RECORD = "record"
"""The key of run.json and summary.json with the record of all attempts; see `run_folder.run_record`."""

IMAGES = "images.json"
"""The digest of the image of each pod, by the pod's name; a launcher writes it."""

SUBMISSION = "submission.json"
"""What was submitted, config and objects: with it `trainyard reproduce` renders the same RayJob again."""

ATTEMPTS = "attempts.jsonl"
"""One line for each attempt: when it started, from which checkpoint, with which versions."""

STARTS = "starts.jsonl"
REPLACEMENTS = "replacements.jsonl"
"""One line for each start of a worker group, and one more with the seconds of each phase of that start."""

FAILURES = "failures.jsonl"
"""One line for each failure of a worker group."""

WORKERS = "workers.json"
"""The pod, process and GPU of each rank."""

METRICS = "metrics.jsonl"
"""One line for each report of metrics."""

PROGRESS = "progress.json"
"""The newest progress report."""

SUMMARY = "summary.json"
"""How the newest attempt ended."""

FINAL_FAILURE = "final-failure.json"
"""The error of an attempt that a retry cannot cure, for the retries of the same submission."""

RUN_LIMIT = "run-limit.json"
"""When the first driver of a submission with `limits.max_run_s` started, for the retries."""

LAST_END = "last-end.json"
"""How the newest driver of a submission with `notify` has ended, for the drivers of its retries."""

NOTICES = "notices"
"""The folder with a notice for each end of a driver: whether the run has ended, and what was reported."""

REPORT = "report.html"
"""The report of a run that succeeded."""

RAY_LOG = "ray.log"
"""The standard error of the newest attempt on a laptop, and that of Ray's own processes."""

MODEL = "model.pt"
"""The weights that the run delivers."""

MODEL_METADATA = "model.json"
"""What is needed to use the delivered model: its network, its classes, the format of its input."""

DATA = "data"
"""The folder of the prepared data set, where the run had to prepare it."""

DATA_VERSIONS = "data-versions.json"
INITIAL_WEIGHTS = "initial-weights.json"
"""The versions of data sets of Lance that the run reads without preparing them, for all attempts."""

TOKENIZER = "tokenizer"
"""The folder with the tokenizer of a language model, where it has one."""

CHECKPOINTS = "checkpoints"
"""The folder of all checkpoints, one folder for each."""

CHECKPOINT_MANIFEST = "manifest.json"
"""The file that makes a checkpoint complete: sizes and hashes of its other files."""

RAY_SNAPSHOT = "checkpoint_manager_snapshot.json"
"""Ray Train's own list of the checkpoints of a run of the user's code."""

CODE = "code"
"""The folder of the archives of the user's code."""

LEASE = "lease"
"""The folder of the claims by which attempts take over from each other; see `lease`."""

SET_ASIDE = "set-aside.txt"
"""The name of the folder to which the files go while `--fresh` sets them aside."""

LOGS = "logs"
"""The folder of the logs of drivers and workers."""

_CHECKPOINT = re.compile(r"s(\d{12})-a(\d+)\.(\d+)")
_MANIFEST = re.compile(rf"{CHECKPOINTS}/([^/]+)/{re.escape(CHECKPOINT_MANIFEST)}")
_LOG = re.compile(rf"{LOGS}/attempt-(\d+)\.log")
_GROUP = re.compile(r"attempt-(\d+)\.(\d+)")
_WORKER_LOG = re.compile(rf"{LOGS}/attempt-(\d+)\.(\d+)/worker-(\d+)\.log")


def log_of(attempt: int) -> str:
    """Return the path of an attempt's log.

    >>> log_of(2)
    'logs/attempt-2.log'
    """
    return f"{LOGS}/attempt-{attempt}.log"


def attempt_of_log(file: str) -> int | None:
    """Return the attempt whose log a file is, or None for any other file."""
    match = _LOG.fullmatch(file)
    return int(match[1]) if match else None


@dataclass(frozen=True, order=True, slots=True)
class WorkerLogName:
    """The name of a worker's log in parts; the newest log of a worker has the greatest name."""

    attempt: int
    """The attempt, from 1."""

    group: int
    """The worker group of the attempt, from 1: each restart of the workers is a new one."""

    rank: int
    """The rank of the worker."""

    @classmethod
    def parse(cls, file: str) -> WorkerLogName | None:
        """Return the parts of a path in the run's folder, or None for any other file."""
        match = _WORKER_LOG.fullmatch(file)
        return cls(*map(int, match.groups())) if match else None

    def __str__(self) -> str:
        return f"{worker_logs_of(self.attempt, self.group)}/worker-{self.rank}.log"


def worker_logs_of(attempt: int, group: int) -> str:
    """Return the path of the folder with the logs of a worker group.

    >>> str(WorkerLogName(2, 1, 17))
    'logs/attempt-2.1/worker-17.log'
    """
    return f"{LOGS}/attempt-{attempt}.{group}"


def group_of_logs(name: str) -> tuple[int, int] | None:
    """Return attempt and worker group of the name of a folder in `logs`, or None for any other name."""
    match = _GROUP.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


@total_ordering
@dataclass(frozen=True, slots=True)
class CheckpointName:
    """The name of a checkpoint in parts; the newest checkpoint of a run has the greatest name."""

    samples: int
    """Training samples seen when it was saved."""

    attempt: int
    """The attempt that saved it, from 1."""

    group: int
    """The attempt's worker group that saved it, from 1."""

    @classmethod
    def parse(cls, text: str) -> CheckpointName | None:
        """Return the parts of a name, or None for a text that is no name of a checkpoint."""
        match = _CHECKPOINT.fullmatch(text)
        return cls(*map(int, match.groups())) if match else None

    @classmethod
    def require(cls, text: str) -> CheckpointName:
        """Return the parts of a name that is known to be one of a checkpoint."""
        name = cls.parse(text)
        assert name is not None, text
        return name

    def __str__(self) -> str:
        return f"s{self.samples:012d}-a{self.attempt}.{self.group}"

    def __lt__(self, other: CheckpointName) -> bool:
        return (self.samples, self.attempt, self.group) < (
            other.samples,
            other.attempt,
            other.group,
        )


def checkpoint_of_manifest(file: str) -> CheckpointName | None:
    """Return the checkpoint whose manifest a file is, or None for any other file.

    >>> checkpoint_of_manifest("checkpoints/s000000000640-a1.1/manifest.json")
    CheckpointName(samples=640, attempt=1, group=1)
    """
    match = _MANIFEST.fullmatch(file)
    return CheckpointName.parse(match[1]) if match else None
