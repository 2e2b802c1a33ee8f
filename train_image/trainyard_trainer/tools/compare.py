"""Two runs side by side: config, results, speed, failures, environment; and their curves in one picture.

python -m trainyard_trainer.tools.compare A B [--storage DIR] [--endpoint URL] [--plot FILE.png] [--json]
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from trainyard_trainer.config.tool_arguments import COMPARE
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_files import names
from trainyard_trainer.run_files.record_text import FIELD_NAMES, ID_DIGITS, git_text, gpus_text
from trainyard_trainer.run_files.standard_streams import run_with_safe_streams
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.progress import TIME_PHASES, per_second, read_lines
from trainyard_trainer.storage import open_filesystem
from trainyard_trainer.terminal import table_text
from trainyard_trainer.tools.command_line import exit_code_of, parse

Record = dict[str, Any]
Points = Sequence[tuple[float, float]]

HEADINGS = ("result", "metrics", "speed", "workers", "environment")
"""What is compared beside the config."""

OF_RECIPES = ("loss", "accuracy", "val_loss", "val_accuracy")
"""Metrics of a built-in recipe."""

DRAWN = ("loss", "val_accuracy")
"""Those of them that are drawn."""

MOST_CHARTS = 4
"""Of what code of one's own has reported."""

PARTS = {
    "startup": "start-up",
    "data": "data wait",
    "compute": "compute",
    "communication": "exchange of gradients",
    "checkpoint": "checkpoints",
    "validation": "validation",
}
"""The parts of TIME_PHASES in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """What a run's folder holds; a file that is not there is empty."""

    label: str
    is_there: bool
    config: Record
    summary: Record
    progress: Record
    metrics: Sequence[Record]
    attempts: Sequence[Record]
    starts: Sequence[Record]
    failures: Sequence[Record]
    submitted: Record
    record: Sequence[Record]
    """Of its attempts; empty if an older trainer has trained it."""

    @property
    def is_own(self) -> bool:
        """Whether it has code of its own."""
        return bool(self.config) and "train" not in self.config

    @property
    def notes(self) -> list[str]:
        """Why it cannot be compared in all."""
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


# What is read.


def open_folders(
    names: Sequence[str], storage: str, endpoint: str | None
) -> list[tuple[str, RunFolder]]:
    """The folders of runs, by name or by a path with a slash in it, each after what it is called here.

    Raises ConfigError if none of them is there.
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
    """All of it that is there, whether the run has ended or not."""

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


# What is compared.


def config_of(a: ComparedRun, b: ComparedRun) -> Record:
    """The fields that differ, and how many do not; the name is not counted."""
    if not (a.config and b.config):
        return {"equal": 0, "differ": []}
    fields = [leaf for leaf in leaves(a.config, b.config) if leaf[0] != "name"]
    differ = [{"field": path, "a": one, "b": other} for path, one, other in fields if one != other]
    return {"equal": len(fields) - len(differ), "differ": differ}


def leaves(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Path and both values of each leaf; what is absent is None."""
    sides = [side if isinstance(side, dict) else {} for side in (a, b)]
    keys = sides[0].keys() | sides[1].keys()
    if not keys or not all(isinstance(side, dict | None) for side in (a, b)):
        yield path, a, b
    for key in sorted(keys):
        yield from leaves(sides[0].get(key), sides[1].get(key), f"{path}.{key}".lstrip("."))


def facts_of(run: ComparedRun) -> dict[str, Record]:
    """All that is compared of a run beside its config, by heading."""
    if not run.config:
        return {heading: {} for heading in HEADINGS}
    metrics = {name: extremes(points) for name, points in curves_of(run).items()}
    found = (result_of(run), metrics, speed_of(run), workers_of(run), environment_of(run))
    return dict(zip(HEADINGS, found, strict=True))


def result_of(run: ComparedRun) -> Record:
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
    """Each metric over samples; what code of one's own has reported, over its reports."""
    curves: dict[str, list[tuple[float, float]]] = {}
    if run.is_own:
        for number, record in enumerate(run.metrics, start=1):
            for name, value in record["metrics"].items():
                if is_number(value):
                    curves.setdefault(name, []).append((number, value))
        return curves
    # Within the first epoch there is nothing else than means since it began.
    epochs = [record for record in run.metrics if record["kind"] == "epoch"]
    for record in epochs or run.metrics:
        for name in OF_RECIPES:
            if is_number(value := record.get(name)):
                curves.setdefault(name, []).append((record["samples"], value))
    return curves


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def extremes(points: Points) -> Record:
    values = [value for _, value in points]
    return {"last": values[-1], "lowest": min(values), "highest": max(values)}


def speed_of(run: ComparedRun) -> Record:
    """Seconds but for the first; those in all are of rank 0, over all attempts."""
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
    """Seconds per step: by these parts of the summary, or by these keys of metrics while there is none."""
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
    """How many there were, how often they began, and what they failed of."""
    last = run.attempts[-1] if run.attempts else {}
    workers = run.summary.get("workers", run.progress.get("workers", last.get("workers")))
    known = {"workers": workers, "attempts": last.get("attempt")}
    if run.is_own:  # of what happens to its workers nothing is written down
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
    """Versions, all that there were; image, code and hardware; hours, all together; memory."""
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
    """Return what the record of a run's attempts tells of its environment; several values as one text."""
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


# How it is shown.


def document_of(a: ComparedRun, b: ComparedRun) -> Record:
    """Return the comparison as `--json` prints it."""
    return {
        "runs": [{"name": run.label, "notes": run.notes, **facts_of(run)} for run in (a, b)],
        "config": config_of(a, b),
    }


def tables(a: ComparedRun, b: ComparedRun) -> Iterator[str]:
    """A table for each heading under which there is something."""
    if a.config and b.config:
        config = config_of(a, b)
        differ = config["differ"]
        yield f"config: {len(differ)} of {config['equal'] + len(differ)} fields differ"
        if differ:
            fields = [(row["field"], written(row["a"]), written(row["b"])) for row in differ]
            yield table_text(("field", a.label, b.label), fields)
    one, other = facts_of(a), facts_of(b)
    for heading in HEADINGS:
        rows = list(rows_of(flat(one[heading]), flat(other[heading])))
        if rows:
            # Without a ratio in any row there is no column for it.
            width = 4 if any(row[3] for row in rows) else 3
            head = (heading, a.label, b.label, "ratio")
            yield table_text(head[:width], [row[:width] for row in rows])


def flat(facts: Record) -> Record:
    """A metric is three rows; two where its name tells whether it should fall or rise."""
    rows: Record = {}
    for name, value in facts.items():
        if not isinstance(value, dict):
            rows[name] = value
            continue
        rows[f"{name}, last"] = value["last"]
        if "acc" not in name:
            rows[f"{name}, lowest"] = value["lowest"]
        if "loss" not in name:
            rows[f"{name}, highest"] = value["highest"]
    return rows


def rows_of(a: Record, b: Record) -> Iterator[tuple[str, str, str, str]]:
    """Name, both values, and how many times the first the second is."""
    for name in dict.fromkeys((*a, *b)):
        one, other = a.get(name), b.get(name)
        if one is not None or other is not None:
            yield name, shown(one), shown(other), ratio(one, other)


def written(value: Any) -> str:
    """As it stands in a config."""
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def shown(value: Any) -> str:
    """For people, in as many digits as they compare."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    return written(value)


def ratio(a: Any, b: Any) -> str:
    return f"{b / a:.2f}" if is_number(a) and is_number(b) and a > 0 else ""


def print_comparison(a: ComparedRun, b: ComparedRun, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(document_of(a, b), indent=2))
        return
    print("\n\n".join(tables(a, b)))
    for run in (a, b):
        for note in run.notes:
            print(f"{run.label}: {note}", file=sys.stderr)


# The picture.


def write_plot(runs: Sequence[ComparedRun], file: Path) -> None:
    """Draw the curves of both. Raises ConfigError if there are none, or the file cannot be written."""
    is_own = all(run.is_own for run in runs if run.metrics)
    curves = {run.label: curves_of(run) if run.is_own == is_own else {} for run in runs}
    there = dict.fromkeys(name for found in curves.values() for name in found)
    names = list(there)[:MOST_CHARTS] if is_own else [name for name in DRAWN if name in there]
    if not names:
        raise ConfigError(f"--plot = {file}: neither run has metrics yet.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(draw(curves, names, "report" if is_own else "samples"))
    except OSError as error:
        raise ConfigError(f"--plot = {file} cannot be written: {error.strerror}") from error
    left_out = [label for label, found in curves.items() if not found]
    without = f", without {', '.join(left_out)}" if left_out else ""
    print(f"plot: {file}{without}", file=sys.stderr)


def draw(curves: Mapping[str, Mapping[str, Points]], names: Sequence[str], unit: str) -> bytes:
    """A PNG file: a chart for each name, a curve for each run that has it."""
    # They take a second, which a table need not wait for.
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from trainyard_trainer.report.charts import BLUE, ORANGE, PLAIN, STEEP, thinned

    output = io.BytesIO()
    with rc_context(PLAIN):
        figure = Figure(figsize=(5.2 * len(names), 3.2), layout="constrained")
        charts = figure.subplots(1, len(names), squeeze=False).flat
        for axes, name in zip(charts, names, strict=True):
            values = [y for found in curves.values() for _, y in found.get(name, ())]
            is_steep = "acc" not in name and max(values) > STEEP * min(values) > 0
            for (label, found), colour in zip(curves.items(), (BLUE, ORANGE), strict=True):
                if name in found:
                    x, y = zip(*thinned(found[name]), strict=True)
                    axes.plot(x, y, color=colour, label=label, marker="o", markersize=3)
            axes.set_yscale("log" if is_steep else "linear")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
            axes.set_title(name, loc="left", parse_math=False)
            axes.set_xlabel(unit)
            axes.legend()
        figure.savefig(output, format="png", dpi=120)
    return output.getvalue()


def main(arguments: list[str] | None = None) -> int:
    _, wanted = parse(arguments, COMPARE)
    folders = open_folders((wanted.a, wanted.b), wanted.storage, wanted.endpoint)
    a, b = (read_run(label, folder) for label, folder in folders)
    print_comparison(a, b, as_json=wanted.json)
    if wanted.plot:
        write_plot((a, b), Path(wanted.plot))
    return 0


if __name__ == "__main__":
    sys.exit(run_with_safe_streams(lambda: exit_code_of(main)))
