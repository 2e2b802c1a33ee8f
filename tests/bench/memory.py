"""Memory of long runs: whether a worker needs more and more of it, and how much Ray's object store holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import data, runs
from tests.bench.processes import descendants, object_store_bytes
from tests.bench.rounds import Options, Row, Section, main, say

MB = 1e6

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
    return [Section(title="Memory", rows=tuple(rows), notes=notes)]


if __name__ == "__main__":
    main(measure)
