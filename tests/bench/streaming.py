"""How fast a stream of JPEG files in Parquet is, beside a plain PyTorch DataLoader over the same row groups.

    python -m tests.bench.streaming

Both read row groups in random order, shuffle the samples of several of them and decode images in the same
number of processes. They take turns; a turn is an epoch.
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
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchvision.io import decode_image

from tests.bench import data, runs
from tests.bench.rounds import Options, Row, Section, alternate, epochs_of, main, ratios
from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.data.loading.torch_loader import TorchBatches
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import Length, Trained

SIDE = 160
GROUP_ROWS = 128
FILES = 4
BATCH = 64
GROUPS_AT_ONCE = 4
ROUNDS = 5
LEAST_SHARE = 0.8

OURS = "stream"
BY_HAND = "DataLoader over row groups"


class RowGroups(IterableDataset):
    """Row groups in random order, each process its own, a few of them shuffled together."""

    def __init__(self, files: list[str]) -> None:
        self.files = files
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        random = np.random.default_rng(self.epoch)
        opened = [pq.ParquetFile(file) for file in self.files]
        groups = [(file, group) for file in opened for group in range(file.num_row_groups)]
        mine = random.permutation(len(groups))[first::step]
        for start in range(0, len(mine), GROUPS_AT_ONCE):
            tables = [
                groups[index][0].read_row_group(groups[index][1], columns=["image", "label"])
                for index in mine[start : start + GROUPS_AT_ONCE]
            ]
            table = pa.concat_tables(tables)
            images, labels = table["image"], table["label"].to_numpy()
            for row in random.permutation(len(table)).tolist():
                file = np.frombuffer(images[row].as_buffer(), np.uint8).copy()
                yield decode_image(torch.from_numpy(file)), int(labels[row])


def write(folder: Path, count: int) -> list[str]:
    """Write JPEG files into a training and a validation part; return the files of training."""
    files = []
    for index, part in enumerate(np.array_split(np.arange(count), FILES)):
        images, labels = data.labelled(index, len(part), 3, SIDE)
        encoded = [data.jpeg(image) for image in images]
        table = pa.table({"image": encoded, "label": labels.astype(np.int64)})
        path = folder / f"train-{index}.parquet"
        pq.write_table(table, path, row_group_size=GROUP_ROWS)
        files.append(str(path))
        if not index:
            pq.write_table(table.slice(0, BATCH), folder / "valid-0.parquet")
    return files


def stream(folder: Path, processes: int) -> Callable[[], float]:
    """Return a function that reads an epoch of the stream, and returns images per second."""
    config = runs.config(
        "streaming",
        folder,
        data__stream=True,
        data__stream_groups=GROUPS_AT_ONCE,
        data__decode_workers=processes,
        train__model__image_size=SIDE,
        train__model__in_channels=3,
        train__global_batch_size=BATCH,
        scaling__num_workers=1,
    )
    found = open_data(config, RunFolder.open(str(folder), "streaming"))
    length = Length.of(config, found.num_train)
    worker = Worker(device=torch.device("cpu"))
    batches = TorchBatches(found, length, Trained(), worker, config)
    return epochs_of(batches.epoch, num_images)


def by_hand(files: list[str], processes: int) -> Callable[[], float]:
    groups = RowGroups(files)
    loader = DataLoader(
        groups,
        BATCH,
        num_workers=processes,
        drop_last=True,
        persistent_workers=processes > 0,
        multiprocessing_context="forkserver" if processes else None,
    )

    def epoch(number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        groups.epoch = number
        for images, labels in loader:
            yield labels, images

    return epochs_of(epoch, num_images)


def num_images(batch: Any) -> int:
    return len(batch[0]) if isinstance(batch, tuple) else len(batch)


def measure(options: Options) -> list[Section]:
    rounds = options.rounds_or(ROUNDS)
    count = options.choose(3_072, 1_024)
    torch.set_num_threads(1)
    sections = []
    with tempfile.TemporaryDirectory(prefix="ty", dir="/tmp") as scratch:
        files = write(Path(scratch), count)
        for processes in (0, 1):
            ways = {OURS: stream(Path(scratch), processes), BY_HAND: by_hand(files, processes)}
            alternate(ways, 1)  # warms up
            rates = alternate(ways, rounds)
            ratio = Row(
                what=f"{OURS} over {BY_HAND}",
                unit="x",
                values=ratios(rates[OURS], rates[BY_HAND]),
                at_least=LEAST_SHARE,
            )
            speeds = [
                Row(what=name, unit="images/s", values=tuple(values))
                for name, values in rates.items()
            ]
            title = f"Streaming, {count:,} JPEG files of {SIDE}x{SIDE} in Parquet, processes: {processes}"
            sections.append(Section(title=title, rows=(ratio, *speeds)))
    return sections


if __name__ == "__main__":
    main(measure)
