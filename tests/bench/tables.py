"""How fast the rows of a table come to a worker, beside a loop that reads its files by hand.

    python -m tests.bench.tables

All ways take turns in one process; a turn is an epoch over the same Parquet files in another random order. By
hand, all files are read into memory first, and a batch is rows of NumPy arrays.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tests.bench import runs
from tests.bench.rounds import Options, Row, Section, alternate, epochs_of, main, ratios
from trainyard_trainer.config.training.own_recipe import OwnData
from trainyard_trainer.data.loading.torch_loader import TorchBatches
from trainyard_trainer.data.loading.user_dataset import UserDataset
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.measurements.progress import Length, Trained

FILES = 8
GROUP_ROWS = 2_048
BATCH = 128
GROUPS_AT_ONCE = 4
ROUNDS = 7
LEAST_SHARE = 0.8

STREAM = "data.stream"
HELD = "held, read at random"
BY_HAND = "pyarrow and numpy by hand"
BY_ROW = "a Dataset with a row per item"


def tensors(count: int, random: np.random.Generator) -> pa.Table:
    """Images of 28x28 pixels, as tensors of Arrow."""
    pixels = random.integers(0, 256, (count, 28, 28), np.uint8)
    images = pa.FixedShapeTensorArray.from_numpy_ndarray(pixels)
    return pa.table({"x": images, "y": random.integers(0, 10, count)})


def vectors(count: int, random: np.random.Generator) -> pa.Table:
    """Lists of 20 numbers, and a number."""
    flat = pa.array(random.random(20 * count, np.float32))
    lists = pa.FixedSizeListArray.from_arrays(flat, 20).cast(pa.list_(pa.float32()))
    return pa.table({"x": lists, "y": random.random(count, np.float32)})


def numbers(count: int, random: np.random.Generator) -> pa.Table:
    """Twelve columns of numbers."""
    return pa.table({f"x{each}": random.random(count, np.float32) for each in range(12)})


KINDS: dict[str, Callable[[int, np.random.Generator], pa.Table]] = {
    "a tensor of 28x28 bytes and a number": tensors,
    "a list of 20 numbers and a number": vectors,
    "12 numbers": numbers,
}


def loader(folder: Path, **data: Any) -> Callable[[], float]:
    """Return a function that reads an epoch with trainyard's torch loader, and returns rows per second."""
    options = OwnData.model_validate({"source": str(folder), "valid_share": 0.05, **data})
    found = UserDataset.open_table(options, endpoint=None, seed=0)
    config = runs.config(
        "tables",
        folder,
        data__decode_workers=0,
        train__global_batch_size=BATCH,
        scaling__num_workers=1,
    )
    length = Length.of(config, found.num_train)
    worker = Worker(device=torch.device("cpu"))
    return epochs_of(TorchBatches(found, length, Trained(), worker, config).epoch, num_rows)


def arrays_of(table: pa.Table) -> dict[str, np.ndarray]:
    arrays = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if isinstance(column.type, pa.FixedShapeTensorType):
            arrays[name] = column.to_numpy_ndarray()
        elif pa.types.is_list(column.type):
            arrays[name] = column.flatten().to_numpy().reshape(len(column), -1)
        else:
            arrays[name] = column.to_numpy()
    return arrays


def by_hand(files: list[str]) -> Callable[[], float]:
    def epoch(number: int) -> Iterator[dict[str, torch.Tensor]]:
        table = pq.read_table(files)
        arrays = arrays_of(table)
        order = np.random.default_rng(number).permutation(len(table))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            rows = order[start : start + BATCH]
            yield {name: torch.from_numpy(array[rows]) for name, array in arrays.items()}

    return epochs_of(epoch, num_rows)


class RowByRow(torch.utils.data.Dataset):
    """What tutorials show: an item is a row of arrays in memory."""

    def __init__(self, files: list[str]) -> None:
        self.arrays = arrays_of(pq.read_table(files))

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: array[index] for name, array in self.arrays.items()}


def by_row(files: list[str]) -> Callable[[], float]:
    rows = torch.utils.data.DataLoader(RowByRow(files), BATCH, shuffle=True, drop_last=True)
    return epochs_of(lambda _: rows, num_rows)


def num_rows(batch: Any) -> int:
    return len(batch[next(iter(batch))])


def measure(options: Options) -> list[Section]:
    rounds = options.rounds_or(ROUNDS)
    count = options.choose(120_000, 24_000)
    torch.set_num_threads(1)
    sections = []
    for title, make in KINDS.items():
        with tempfile.TemporaryDirectory(prefix="ty", dir="/tmp") as scratch:
            folder, random = Path(scratch), np.random.default_rng(0)
            files = [str(folder / f"part-{file}.parquet") for file in range(FILES)]
            for file in files:
                pq.write_table(make(count // FILES, random), file, row_group_size=GROUP_ROWS)
            ways = {
                STREAM: loader(folder, stream=True, stream_groups=GROUPS_AT_ONCE),
                HELD: loader(folder),
                BY_HAND: by_hand(files),
                BY_ROW: by_row(files),
            }
            alternate(ways, 1)  # warms up
            rates = alternate(ways, rounds)
        compared = [
            Row(
                what=f"{name} over {other}",
                unit="x",
                values=ratios(rates[name], rates[other]),
                at_least=least,
            )
            for name, other, least in (
                (STREAM, BY_HAND, LEAST_SHARE),
                (HELD, BY_HAND, None),
                (STREAM, BY_ROW, None),
            )
        ]
        speeds = [
            Row(what=name, unit="rows/s", values=tuple(values)) for name, values in rates.items()
        ]
        heading = f"A table of {count:,} rows in {FILES} Parquet files: {title}"
        sections.append(Section(title=heading, rows=(*compared, *speeds)))
    return sections


if __name__ == "__main__":
    main(measure)
