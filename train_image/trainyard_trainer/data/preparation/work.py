"""The files of a data set, one after the other; none is made twice, however often the work is killed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from trainyard_trainer.data.preparation.convert import Sums, convert
from trainyard_trainer.data.preparation.external_shuffle import Runs, pack_run
from trainyard_trainer.data.preparation.plan import Part, Plan
from trainyard_trainer.data.prepared import write_part
from trainyard_trainer.data.sources.samples import Place
from trainyard_trainer.run_folder.folder import RunFolder

STATE = ".prepare"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A file that is written, and what it has. One without rows is not there."""

    file: str
    rows: int
    bytes: int
    sha256: str
    class_counts: dict[int, int]
    sums: Sums
    bad: list[tuple[Place, str]]

    @classmethod
    def of_json(cls, known: dict[str, Any]) -> Finished:
        counts = {int(label): count for label, count in known["class_counts"].items()}
        bad = [(Place(*place), reason) for place, reason in known["bad"]]
        sums = Sums.of_json(known["sums"])
        return cls(**known | {"class_counts": counts, "sums": sums, "bad": bad})


class Content(NamedTuple):
    """What goes into a file, and what will be said of it."""

    data: bytes
    labels: np.ndarray
    sums: Sums
    bad: list[tuple[Place, str]]


class Written(NamedTuple):
    """A part of a data set."""

    files: list[Finished]
    sums: Sums


def state_path(dest: RunFolder, name: str) -> str:
    return f"{dest.root}/{STATE}/{name}"


class Work:
    """Writes what is missing of the parts of a data set."""

    def __init__(
        self,
        dest: RunFolder,
        plan: Plan,
        header: dict[str, Any],
        *,
        pool: Executor,
        show: Callable[[str, int, int], None],
        note_bad: Callable[[str, list[tuple[Place, str]]], None],
    ) -> None:
        self._dest = dest
        self._plan = plan
        self._header = header
        self._pool = pool
        self._show = show
        self._note_bad = note_bad
        self._stage = ""
        self._done = self._total = 0

    def write(self, part: Part) -> Written:
        """All files of a part, straight from its source or by way of runs."""
        rows_per_file = self._plan.rows_per_file[part.name]
        runs = self._write_runs(part) if part.name in self._plan.rows_per_run else []
        self._begin(f"writing {part.name}", len(part.order))
        files: list[Finished] = []
        first_id = 0
        for number, start in enumerate(range(0, len(part.order), rows_per_file)):
            rows = part.order[start : start + rows_per_file]
            file = f"{part.name}/part-{number:05}.parquet"
            make = partial(self._convert_file, part, rows, file, first_id)
            if runs:
                make = partial(self._gather_file, part, rows, file, first_id, runs, number)
            finished = self._once(file, f"{part.name}-{number:05}", make)
            self._note_bad(part.name, finished.bad)
            self._reach(start + len(rows))
            first_id += finished.rows
            files.append(finished)
        return Written(files, self._add_up(runs or files))

    def _convert_file(self, part: Part, rows: np.ndarray, file: str, first_id: int) -> Content:
        found = convert(part.samples, rows, self._plan.form, self._pool, self._advance)
        labels = part.labels[rows[found.places]]
        data = write_part(self._header, file, first_id, found.values, labels)
        return Content(data, labels, found.sums, _name_bad(part, rows, found.problems))

    # By way of runs.

    def _write_runs(self, part: Part) -> list[Finished]:
        """The rows as they come from the source, a run at a time."""
        rows_per_run = self._plan.rows_per_run[part.name]
        # The places that the rows will have, in the order in which the source has the rows.
        positions = np.argsort(part.order)
        self._begin(f"reading {part.name}", len(positions))
        runs = []
        for number, start in enumerate(range(0, len(positions), rows_per_run)):
            chosen = positions[start : start + rows_per_run]
            name = f"{part.name}-run-{number:05}"
            file = f"{STATE}/{name}.arrow"
            finished = self._once(file, name, partial(self._convert_run, part, chosen))
            self._note_bad(part.name, finished.bad)
            self._reach(start + len(chosen))
            runs.append(finished)
        return runs

    def _convert_run(self, part: Part, positions: np.ndarray) -> Content:
        rows = part.order[positions]
        found = convert(part.samples, rows, self._plan.form, self._pool, self._advance)
        file_of = positions // self._plan.rows_per_file[part.name]
        num_files = -(-len(part.order) // self._plan.rows_per_file[part.name])
        data = pack_run(found, positions, file_of, num_files)
        labels = part.labels[rows[found.places]]
        return Content(data, labels, found.sums, _name_bad(part, rows, found.problems))

    def _gather_file(
        self,
        part: Part,
        rows: np.ndarray,
        file: str,
        first_id: int,
        runs: list[Finished],
        number: int,
    ) -> Content:
        found = Runs(self._dest, [run.file for run in runs if run.rows]).take(number)
        places = found.positions - number * self._plan.rows_per_file[part.name]
        labels = part.labels[rows[places]]
        data = write_part(self._header, file, first_id, found.values, labels)
        return Content(data, labels, self._no_sums(), [])

    # Once.

    def _once(self, file: str, name: str, make: Callable[[], Content]) -> Finished:
        """The file as it was finished before, or made now."""
        state = state_path(self._dest, f"{name}.json")
        if self._dest.exists(state):
            finished = Finished.of_json(json.loads(self._dest.read(state)))
            if self._is_intact(finished):
                return finished
        content = make()
        if len(content.labels):
            self._dest.write(f"{self._dest.root}/{file}", content.data)
        labels, counts = np.unique(content.labels, return_counts=True)
        finished = Finished(
            file=file,
            rows=len(content.labels),
            bytes=len(content.data),
            sha256=hashlib.sha256(content.data).hexdigest(),
            class_counts=dict(zip(labels.tolist(), counts.tolist(), strict=True)),
            sums=content.sums,
            bad=content.bad,
        )
        self._dest.write(state, json.dumps(asdict(finished)))
        return finished

    def _is_intact(self, finished: Finished) -> bool:
        path = f"{self._dest.root}/{finished.file}"
        if not finished.rows:
            return True
        if self._dest.size(path) != finished.bytes:
            return False
        return hashlib.sha256(self._dest.read(path)).hexdigest() == finished.sha256

    def _add_up(self, found: list[Finished]) -> Sums:
        total = self._no_sums()
        for finished in found:
            total = total.plus(finished.sums)
        return total

    def _no_sums(self) -> Sums:
        return Sums.none(self._plan.form.shape[0])

    # Progress.

    def _begin(self, stage: str, total: int) -> None:
        self._stage, self._done, self._total = stage, 0, total

    def _advance(self, count: int) -> None:
        self._reach(self._done + count)

    def _reach(self, done: int) -> None:
        self._done = done
        self._show(self._stage, done, self._total)


def _name_bad(part: Part, rows: np.ndarray, problems: dict[int, str]) -> list[tuple[Place, str]]:
    return [(part.samples.where(int(rows[place])), problems[place]) for place in sorted(problems)]
