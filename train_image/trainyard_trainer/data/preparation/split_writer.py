"""Write the files of each split, one after the other. A resumed preparation keeps the finished files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from trainyard_trainer.data.preparation.convert import PixelSums, convert
from trainyard_trainer.data.preparation.destination import STATE, state_path
from trainyard_trainer.data.preparation.external_shuffle import SortedChunks, pack_chunk
from trainyard_trainer.data.preparation.plan import PlannedSplit, PreparationPlan
from trainyard_trainer.data.sources.parts import SampleLocation
from trainyard_trainer.data.stored_rows import write_part
from trainyard_trainer.run_folder.folder import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedFile:
    """The record of a written file. A file without rows is not written."""

    file: str
    rows: int
    bytes: int
    sha256: str
    class_counts: dict[int, int]
    sums: PixelSums
    bad: list[tuple[SampleLocation, str]]

    @classmethod
    def of_json(cls, record: dict[str, Any]) -> FinishedFile:
        counts = {int(label): count for label, count in record["class_counts"].items()}
        bad = [(SampleLocation(*location), reason) for location, reason in record["bad"]]
        sums = PixelSums.of_json(record["sums"])
        return cls(**record | {"class_counts": counts, "sums": sums, "bad": bad})


class Content(NamedTuple):
    """The bytes of a file, and what its record needs."""

    data: bytes
    labels: np.ndarray
    sums: PixelSums
    bad: list[tuple[SampleLocation, str]]


class WrittenSplit(NamedTuple):
    """All files of a split, and the sums of its pixels."""

    files: list[FinishedFile]
    sums: PixelSums


class SplitWriter:
    """Writes the missing files of the splits of a data set."""

    def __init__(
        self,
        dest: RunFolder,
        plan: PreparationPlan,
        header: dict[str, Any],
        *,
        pool: Executor,
        show: Callable[[str, int, int], None],
        note_bad: Callable[[str, list[tuple[SampleLocation, str]]], None],
    ) -> None:
        self._dest = dest
        self._plan = plan
        self._header = header
        self._pool = pool
        self._show = show
        self._note_bad = note_bad
        self._stage = ""
        self._done = self._total = 0

    def write(self, part: PlannedSplit) -> WrittenSplit:
        """Write all files of a split, directly from its source or by way of sorted chunks."""
        rows_per_file = self._plan.rows_per_file[part.name]
        chunks = self._write_chunks(part) if part.name in self._plan.rows_per_chunk else []
        self._begin(f"writing {part.name}", len(part.order))
        files: list[FinishedFile] = []
        first_id = 0
        for number, start in enumerate(range(0, len(part.order), rows_per_file)):
            rows = part.order[start : start + rows_per_file]
            file = f"{part.name}/part-{number:05}.parquet"
            make = partial(self._convert_file, part, rows, file, first_id)
            if chunks:
                make = partial(self._gather_file, part, rows, file, first_id, chunks, number)
            finished = self._finish_once(part.name, file, f"{part.name}-{number:05}", make)
            self._reach(start + len(rows))
            first_id += finished.rows
            files.append(finished)
        return WrittenSplit(files, self._add_up(chunks or files))

    def _convert_file(
        self, part: PlannedSplit, rows: np.ndarray, file: str, first_id: int
    ) -> Content:
        found = convert(part.samples, rows, self._plan.form, self._pool, self._advance)
        labels = part.labels[rows[found.indices]]
        data = write_part(self._header, file, first_id, found.values, labels)
        return Content(data, labels, found.sums, _name_bad(part, rows, found.problems))

    # By way of sorted chunks.

    def _write_chunks(self, part: PlannedSplit) -> list[FinishedFile]:
        """Write the rows in the order of the source, a sorted chunk at a time."""
        rows_per_chunk = self._plan.rows_per_chunk[part.name]
        # The position of each row in the split, in the order of the source.
        positions = np.argsort(part.order)
        self._begin(f"reading {part.name}", len(positions))
        chunks = []
        for number, start in enumerate(range(0, len(positions), rows_per_chunk)):
            chosen = positions[start : start + rows_per_chunk]
            name = f"{part.name}-chunk-{number:05}"
            file = f"{STATE}/{name}.arrow"
            make = partial(self._convert_chunk, part, chosen)
            finished = self._finish_once(part.name, file, name, make)
            self._reach(start + len(chosen))
            chunks.append(finished)
        return chunks

    def _convert_chunk(self, part: PlannedSplit, positions: np.ndarray) -> Content:
        rows = part.order[positions]
        found = convert(part.samples, rows, self._plan.form, self._pool, self._advance)
        file_of = positions // self._plan.rows_per_file[part.name]
        num_files = -(-len(part.order) // self._plan.rows_per_file[part.name])
        data = pack_chunk(found, positions, file_of, num_files)
        labels = part.labels[rows[found.indices]]
        return Content(data, labels, found.sums, _name_bad(part, rows, found.problems))

    def _gather_file(
        self,
        part: PlannedSplit,
        rows: np.ndarray,
        file: str,
        first_id: int,
        chunks: list[FinishedFile],
        number: int,
    ) -> Content:
        found = SortedChunks(self._dest, [chunk.file for chunk in chunks if chunk.rows]).take(
            number
        )
        indices = found.positions - number * self._plan.rows_per_file[part.name]
        labels = part.labels[rows[indices]]
        data = write_part(self._header, file, first_id, found.values, labels)
        return Content(data, labels, self._no_sums(), [])

    # Records of finished files.

    def _finish_once(
        self, split: str, file: str, name: str, make: Callable[[], Content]
    ) -> FinishedFile:
        """Return the record of a file: of an intact file of an earlier attempt, or of one written now.

        A file that lacks bad samples is written anew: they may have been repaired since. For the same reason
        no record is written where they are more than allowed, which raises ConfigError.
        """
        state = state_path(self._dest, f"{name}.json")
        if self._dest.exists(state):
            finished = FinishedFile.of_json(json.loads(self._dest.read(state)))
            if not finished.bad and self._is_intact(finished):
                return finished
        content = make()
        self._note_bad(split, content.bad)
        if len(content.labels):
            self._dest.write(f"{self._dest.root}/{file}", content.data)
        labels, counts = np.unique(content.labels, return_counts=True)
        finished = FinishedFile(
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

    def _is_intact(self, finished: FinishedFile) -> bool:
        path = f"{self._dest.root}/{finished.file}"
        if not finished.rows:
            return True
        if self._dest.size(path) != finished.bytes:
            return False
        return self._dest.sha256(path) == finished.sha256

    def _add_up(self, found: list[FinishedFile]) -> PixelSums:
        total = self._no_sums()
        for finished in found:
            total = total.plus(finished.sums)
        return total

    def _no_sums(self) -> PixelSums:
        return PixelSums.none(self._plan.form.shape[0])

    # Progress.

    def _begin(self, stage: str, total: int) -> None:
        self._stage, self._done, self._total = stage, 0, total

    def _advance(self, count: int) -> None:
        self._reach(self._done + count)

    def _reach(self, done: int) -> None:
        self._done = done
        self._show(self._stage, done, self._total)


def _name_bad(
    part: PlannedSplit, rows: np.ndarray, problems: dict[int, str]
) -> list[tuple[SampleLocation, str]]:
    """Return the locations of bad samples, with the reasons; `problems` has them by their index in `rows`."""
    return [(part.samples.where(int(rows[index])), problems[index]) for index in sorted(problems)]
