"""Read two runs from their folders, and compare config, result, metrics, speed, workers and environment."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_files import names
from trainyard_trainer.run_files.record_text import FIELD_NAMES, ID_DIGITS, git_text, gpus_text
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.metrics import quality_of
from trainyard_trainer.run_folder.measurements.progress import TIME_PHASES, per_second, read_lines
from trainyard_trainer.storage import open_filesystem

Record = dict[str, Any]
Points = Sequence[tuple[float, float]]

HEADINGS = ("result", "metrics", "speed", "workers", "environment")
"""The parts of a comparison, besides the config."""

PARTS = {
    "startup": "start-up",
    "data": "data wait",
    "compute": "compute",
    "communication": "exchange of gradients",
    "checkpoint": "checkpoints",
    "validation": "validation",
}
"""The names of the phases of `progress.TIME_PHASES` in the comparison."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """The content of a run's folder; a file that does not exist is empty."""

    label: str
    """The name of the run in the output."""
    is_there: bool
    """Whether the folder exists."""
    config: Record
    summary: Record
    progress: Record
    metrics: Sequence[Record]
    attempts: Sequence[Record]
    starts: Sequence[Record]
    failures: Sequence[Record]
    submitted: Record
    record: Sequence[Record]
    """The run's record of its attempts; empty for a run of an older version of trainyard."""

    @property
    def is_own(self) -> bool:
        """Whether it is a run with the user's code."""
        return bool(self.config) and "train" not in self.config

    @property
    def notes(self) -> list[str]:
        """Reasons why parts of the comparison are missing."""
        notes = []
        if not self.is_there:
            notes.append("there is no such run")
        elif not self.config:
            notes.append("it has not begun")
        elif not self.summary:
            share = f" ({self.progress['percent']:g} %)" if "percent" in self.progress else ""
            notes.append(f"it has not ended{share}: what is known at the end is missing")
        elif self.summary["error"]:
            how = "was stopped" if self.summary["outcome"] == "stopped" else "failed"
            notes.append(f"it {how}: {self.summary['error']}")
        if self.is_own and not self.metrics:
            notes.append("it has code of its own, which has reported no metrics")
        return notes


# Read the folders of the runs.


def open_folders(
    names: Sequence[str], storage: str, endpoint: str | None
) -> list[tuple[str, RunFolder]]:
    """Return the label and the folder of each run, which is given by its name or by a path with a slash.

    Raises ConfigError if none of the folders exists.
    """
    folders = [
        RunFolder(*open_filesystem(name, endpoint))
        if "/" in name
        else RunFolder.open(storage, name, endpoint)
        for name in names
    ]
    if not any(folder.exists(folder.root) for folder in folders):
        shown = " and ".join(folder.show(folder.root) for folder in folders)
        raise ConfigError(
            f"there are no runs {shown}.\n       Name their storage with --storage DIR."
        )
    are_alike = len({folder.name for folder in folders}) < len(folders)
    return [(folder.show(folder.root) if are_alike else folder.name, folder) for folder in folders]


def read_run(label: str, folder: RunFolder) -> ComparedRun:
    """Read the folder of a run, which may still be running.

    A file that does not exist yet counts as empty.
    """

    def document(path: str) -> Record:
        found: Record = json.loads(folder.read(path)) if folder.exists(path) else {}
        return found

    config = document(folder.run)
    record = config.pop(names.RECORD, [])
    return ComparedRun(
        label=label,
        is_there=folder.exists(folder.root),
        config=config,
        record=record,
        summary=document(folder.summary),
        progress=document(folder.progress),
        metrics=read_lines(folder, folder.metrics),
        attempts=read_lines(folder, folder.attempts),
        starts=read_lines(folder, folder.starts),
        failures=read_lines(folder, folder.failures),
        submitted=document(f"{folder.root}/{names.SUBMISSION}"),
    )


# Compare them.


def config_of(a: ComparedRun, b: ComparedRun) -> Record:
    """Return the fields of the config that differ, and the number of equal fields, without the run's name."""
    if not (a.config and b.config):
        return {"equal": 0, "differ": []}
    fields = [leaf for leaf in leaves(a.config, b.config) if leaf[0] != "name"]
    differ = [{"field": path, "a": one, "b": other} for path, one, other in fields if one != other]
    return {"equal": len(fields) - len(differ), "differ": differ}


def leaves(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the path and both values of each field of two nested mappings; None for a missing field."""
    sides = [side if isinstance(side, dict) else {} for side in (a, b)]
    keys = sides[0].keys() | sides[1].keys()
    if not keys or not all(isinstance(side, dict | None) for side in (a, b)):
        yield path, a, b
    for key in sorted(keys):
        yield from leaves(sides[0].get(key), sides[1].get(key), f"{path}.{key}".lstrip("."))


def facts_of(run: ComparedRun) -> dict[str, Record]:
    """Return the values of a run that are compared, besides its config, by heading."""
    if not run.config:
        return {heading: {} for heading in HEADINGS}
    metrics = {name: extremes(points) for name, points in curves_of(run).items()}
    found = (result_of(run), metrics, speed_of(run), workers_of(run), environment_of(run))
    return dict(zip(HEADINGS, found, strict=True))


def result_of(run: ComparedRun) -> Record:
    """Return the outcome and the length of a run."""
    summary, progress = run.summary, run.progress
    outcome = {"outcome": summary.get("outcome")}
    if run.is_own:
        return outcome | {"reports": len(run.metrics)}
    return outcome | {
        "epochs": summary.get("epochs"),
        "stopped early": summary.get("stopped_early"),
        "best epoch": summary.get("best_epoch"),
        "steps": summary.get("steps", progress.get("step")),
        "samples": summary.get("samples_seen", progress.get("samples")),
    }


def curves_of(run: ComparedRun) -> dict[str, list[tuple[float, float]]]:
    """Return the curve of each metric over samples; for the user's code, over the number of the report."""
    curves: dict[str, list[tuple[float, float]]] = {}
    if run.is_own:
        for number, record in enumerate(run.metrics, start=1):
            for name, value in record["metrics"].items():
                if is_number(value):
                    curves.setdefault(name, []).append((number, value))
        return curves
    # Until the end of the first epoch there are only records of steps.
    epochs = [record for record in run.metrics if record["kind"] == "epoch"]
    for record in epochs or run.metrics:
        for name, value in quality_of(record).items():
            if is_number(value):
                curves.setdefault(name, []).append((record["samples"], value))
    return curves


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number, which True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def extremes(points: Points) -> Record:
    """Return the last, the lowest and the highest value of a curve."""
    values = [value for _, value in points]
    return {"last": values[-1], "lowest": min(values), "highest": max(values)}


def speed_of(run: ComparedRun) -> Record:
    """Return the samples per second, and the seconds of training by phase.

    Seconds "in all" are those of rank 0, over all attempts.
    """
    summary = run.summary
    if run.is_own:
        return {"last attempt in all, s": summary.get("run_s")}
    spent = summary.get("seconds", {})
    of_steps = ("data", "compute", "communication")
    return {
        "samples/s": summary.get("samples_per_s", run.progress.get("samples_per_s")),
        "a step, s": per_step(run, of_steps, ("data_wait_s", "step_s")),
        "data wait of a step, s": per_step(run, ("data",), ("data_wait_s",)),
        "training in all, s": summary.get("train_s"),
        **{f"{PARTS[part]} in all, s": spent.get(part) for part in TIME_PHASES},
    }


def per_step(run: ComparedRun, parts: Sequence[str], keys: Sequence[str]) -> float | None:
    """Return the seconds per step that some phases take.

    They come from the phases `parts` of the summary or, while the run has no summary, from the keys `keys` of
    its metrics.
    """
    if run.summary.get("steps"):
        spent = run.summary["seconds"]
        return per_second(sum(spent.get(part, 0.0) for part in parts), run.summary["steps"])
    seconds, steps = 0.0, 0
    for before, record in pairwise([{"step": 0}, *run.metrics]):
        values = [record[key] for key in keys]
        if None not in values:
            made = record["step"] - before["step"]
            seconds, steps = seconds + made * sum(values), steps + made
    return seconds / steps if steps else None


def workers_of(run: ComparedRun) -> Record:
    """Return the number of workers, attempts, worker groups, failures and repeated steps."""
    last = run.attempts[-1] if run.attempts else {}
    workers = run.summary.get("workers", run.progress.get("workers", last.get("workers")))
    known = {"workers": workers, "attempts": last.get("attempt")}
    if run.is_own:  # the failures of its workers are not recorded
        return known
    groups = {(start["attempt"], start["group"]): start for start in run.starts}
    again = [start["reached_step"] - start["step"] for start in groups.values() if "step" in start]
    return known | {
        "worker groups": len(groups),
        "worker failures": sum(failure["rank"] is not None for failure in run.failures),
        "nodes left": sum(failure["rank"] is None for failure in run.failures),
        "steps made again": sum(again),
    }


def environment_of(run: ComparedRun) -> Record:
    """Return the versions of all attempts, the image, the code, the hardware, the hours and the memory."""
    versions: dict[str, dict[str, None]] = {}
    for attempt in (*run.attempts, *run.record):
        for name, version in attempt["versions"].items():
            versions.setdefault(name, {})[version] = None
    memory = max((record.get("memory_bytes", 0) for record in run.metrics), default=0)
    return {
        **{name: ", ".join(found) for name, found in versions.items()},
        "image": run.submitted.get("launch", {}).get("image"),
        **recorded(run.record),
        "memory of a worker (rank 0), MiB": round(memory / 2**20, 1) if memory else None,
    }


def recorded(record: Sequence[Record]) -> Record:
    """Return the environment of all attempts from the run's record; several values become one text."""
    if not record:
        return {}

    def joined(values: Iterable[str | None]) -> str | None:
        return ", ".join(dict.fromkeys(value for value in values if value)) or None

    nodes = [node for attempt in record for node in attempt["nodes"]]
    fields = {
        "image_digests": joined(digest for each in record for digest in each["image_digests"]),
        "git": joined(git_text(each["git"]) for each in record if each["git"]),
        "code_sha256": joined((each["code_sha256"] or "")[:ID_DIGITS] for each in record),
        "nodes": len({(node["name"], node["id"]) for node in nodes}),
        "gpus": gpus_text(record) if any(node["gpus"] for node in nodes) else None,
        "gpu_driver": joined(node["gpu_driver"] for node in nodes),
        "gpu_hours": round(sum(each["gpu_hours"] for each in record), 4),
        "cpu_hours": round(sum(each["cpu_hours"] for each in record), 4),
    }
    return {FIELD_NAMES[field]: value for field, value in fields.items()}
