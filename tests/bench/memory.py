"""Memory of long runs: whether a worker needs more and more of it, and how much Ray's object store holds."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from tests.bench import data, runs
from tests.bench.processes import descendants, object_store_bytes
from tests.bench.rounds import Options, Row, Section, main, say

MB = 1e6

GIB = 2**30

LARGEST_TABLE = 2.0
"""Memory of a process that reads a table over `data.memory_gib`."""

LARGEST_GROWTH = 1.02
"""Peak of a run over the peak of its second quarter."""

STORE_BYTES = 160 * 2**20

WORKERS = ("RayTrainWorker", "trainer --without-ray")
"""What stands in the command line of a worker of either kind."""

GREY_MODEL = {"name": "shufflenet_v2_x0_5", "in_channels": 1, "num_classes": 10, "image_size": 28}
COLOUR_MODEL = GREY_MODEL | {"in_channels": 3, "image_size": 32}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run whose memory is watched."""

    title: str
    loader: str
    data: Path
    model: dict[str, Any]


class Watched:
    """The memory of a run's processes over its time."""

    def __init__(self) -> None:
        self.own: dict[int, list[int]] = defaultdict(list)
        """Bytes of each worker, by process id."""
        self.store_bytes = 0
        """Most that the object store has held."""

    def look(self, pid: int, metrics: list[dict[str, Any]]) -> None:
        for process in descendants(pid):
            # Before the first line of metrics a worker imports.
            if metrics and any(word in process.command for word in WORKERS):
                self.own[process.pid].append(process.own_bytes)
            if process.command.split(" ")[0].endswith("/raylet"):
                with suppress(FileNotFoundError):  # it has ended
                    self.store_bytes = max(self.store_bytes, object_store_bytes(process.pid))

    @property
    def peak_bytes(self) -> int:
        return max(map(max, self.own.values()))

    @property
    def growth(self) -> float:
        """Of the worker that grew most. The first quarter is left out: there the run warms up."""
        return max(map(growth, self.own.values()))


def growth(values: list[int]) -> float:
    quarter = len(values) // 4
    return max(values[quarter:]) / max(values[quarter : max(2 * quarter, quarter + 1)])


def growth_on_record(metrics: list[dict[str, Any]]) -> float:
    """By the run's own account: rank 0's peak after the last epoch over that after a quarter of them."""
    peaks = [record["memory_bytes"] for record in metrics if record["kind"] == "epoch"]
    return peaks[-1] / peaks[(len(peaks) - 1) // 4]


def watch(case: Case, options: Options) -> tuple[Watched, list[dict[str, Any]]]:
    watched = Watched()
    config = runs.config(
        f"memory-{case.data.name}-{case.loader}",
        case.data,
        data__loader=case.loader,
        train__model=case.model,
        train__epochs=options.choose(20, 2),
    )
    environment = {"RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(STORE_BYTES)}
    ran = runs.run(config, look=watched.look, environment=environment)
    say(f"  {case.title}: {watched.peak_bytes / MB:.0f} MB, growth {watched.growth:.3f}")
    return watched, ran.metrics


def rows_of(case: Case, options: Options) -> list[Row]:
    rounds = [watch(case, options) for _ in range(options.rounds_or(2))]

    def row(what: str, unit: str, value: Callable[..., float], at_most: float | None = None) -> Row:
        values = tuple(value(*found) for found in rounds)
        return Row(what=f"{case.title}: {what}", unit=unit, values=values, at_most=at_most)

    rows = [
        row(
            "a worker's own memory at most", "MB", lambda watched, metrics: watched.peak_bytes / MB
        ),
        row(
            "peak of the run over its second quarter's",
            "x",
            lambda watched, metrics: watched.growth,
            LARGEST_GROWTH,
        ),
        row(
            "the same after 20 epochs over after 5, by metrics.jsonl",
            "x",
            lambda watched, metrics: growth_on_record(metrics),
            LARGEST_GROWTH,
        ),
    ]
    if case.loader == "ray":
        rows.append(
            row(
                "object store, most that it took",
                "MB",
                lambda watched, metrics: watched.store_bytes / MB,
                STORE_BYTES / MB,
            )
        )
    return rows


TABLE_GIB = 1 / 16
"""`data.memory_gib` of the table."""

READ_TABLE = """
import resource, sys
import numpy as np
from trainyard_trainer.data.sources.rows.find_rows import open_table

path, memory_bytes = sys.argv[1:]
options = {"endpoint": None, "columns": None, "valid_share": 0.01, "seed": 0}
rows = open_table(split="train", source=path, memory_bytes=float(memory_bytes), **options)
rows[0]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
order = np.random.default_rng(0).permutation(len(rows))[:2_000]
for part in np.array_split(order, 60):
    rows.read(part)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
"""A program that reads rows of a table at random, and prints by how many KiB its memory has grown."""


def table_growth(folder: Path) -> float:
    """Return the bytes that a process needs for rows of a table at random, beyond those for the first one."""
    command = [sys.executable, "-c", READ_TABLE, str(folder), str(TABLE_GIB * GIB)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(ran.stdout) * 1024


def table_section(options: Options) -> Section:
    """Measure the memory of a process that reads a table of many files."""
    files, rows = options.choose(64, 16), 8_192
    numbers = np.random.default_rng(0).random((rows, 256), np.float32)
    with tempfile.TemporaryDirectory(prefix="ty", dir="/tmp") as scratch:
        column = pa.FixedSizeListArray.from_arrays(pa.array(numbers.reshape(-1)), 256)
        for file in range(files):
            parquet.write_table(
                pa.table({"x": column}), f"{scratch}/part-{file:02}.parquet", row_group_size=1_024
            )
        grown = [table_growth(Path(scratch)) / MB for _ in range(options.rounds_or(2))]
    row = Row(
        what=f"rows of {files} Parquet files at random, with data.memory_gib: {TABLE_GIB:g}",
        unit="MB",
        values=tuple(grown),
        at_most=LARGEST_TABLE * TABLE_GIB * GIB / MB,
    )
    notes = (
        f"The files take {files * numbers.nbytes / MB:.0f} MB in memory, of which a process may hold "
        f"{TABLE_GIB * GIB / MB:.0f} MB. What it needs beside is for decompression, and what Arrow keeps of "
        "freed memory.",
    )
    return Section(title="Memory of a table", rows=(row,), notes=notes)


def measure(options: Options) -> list[Section]:
    grey = data.grey_images(options.choose(4_000, 400))
    pictures = data.jpegs(options.choose(2_500, 200), 96)
    cases = (
        Case(title="torch loader", loader="torch", data=grey, model=GREY_MODEL),
        Case(title="Ray loader, data held", loader="ray", data=grey, model=GREY_MODEL),
        Case(title="Ray loader, data streamed", loader="ray", data=pictures, model=COLOUR_MODEL),
    )
    rows = [row for case in cases for row in rows_of(case, options)]
    notes = (
        "20 epochs on 2 CPU workers. A worker's own memory is what is neither a file nor shared. "
        f"The object store is limited to {STORE_BYTES / MB:.0f} MB, of which data may fill a quarter; "
        f"the streamed pictures take {2_000 * 96 * 96 * 3 / MB:.0f} MB once they are decoded.",
    )
    return [Section(title="Memory", rows=tuple(rows), notes=notes), table_section(options)]


if __name__ == "__main__":
    main(measure)
