"""Data whose images show their own id, and groups of workers that read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import made_sources
import numpy as np
import pyarrow as pa
import torch
from training import Group, ThreadWorker, small_config

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data import stored_rows
from trainyard_trainer.data.loading.batch import Batch, Batches
from trainyard_trainer.data.prepared import DatasetInfo, Prepared, Split
from trainyard_trainer.run_folder.measurements.progress import Length, Trained

Given = list[list[list[int]]]
"""Ids in an epoch: of each worker, of each of its batches."""

Make = Callable[[Trained, dict[str, torch.Tensor], ThreadWorker], Batches]


def prepared_of(folder: Path, count: int, *, encoding: Any = "raw", per_file: int = 40) -> Prepared:
    images = DatasetInfo(
        source="test",
        shape=(1, 8, 8),
        encoding=encoding,
        classes=made_sources.NAMES,
        mean=(0.5,),
        std=(0.25,),
    )
    header = stored_rows.header_of(images.source, images.shape, images.encoding, images.classes)
    pixels, labels = made_sources.pixels(count), made_sources.labels(count)
    values = stored_rows.pixels_to_values(pixels)
    if encoding == "encoded":
        values = pa.array([made_sources.png(image) for image in pixels], pa.binary())
    files = {}
    for first in range(0, count, per_file):
        path = folder / f"part-{first:05}.parquet"
        rows = slice(first, first + per_file)
        path.write_bytes(
            stored_rows.write_part(header, path.name, first, values[rows], labels[rows])
        )
        files[str(path)] = len(labels[rows])
    split = Split(files=tuple(files), rows=tuple(files.values()))
    return Prepared(info=images, train=split, valid=split, path=str(folder), endpoint=None)


def config_of(folder: Path, batch_size: int, **changes: Any) -> TrainerConfig:
    known = {"train__global_batch_size": batch_size, "train__epochs": 3}
    return small_config(folder, **known | changes)


def ids_of(batches: Iterable[Batch]) -> list[list[int]]:
    """The ids of each batch, whose pixels and labels must be those of the ids."""
    found = []
    for batch in batches:
        shown = batch["image"][:, 0, 0, :4].numpy().copy().view(">u4").reshape(-1)
        assert shown.tolist() == batch.ids.tolist()
        assert batch["label"].tolist() == (batch.ids % len(made_sources.NAMES)).tolist()
        assert batch["image"].shape[1:] == (1, 8, 8)
        found.append(batch.ids.tolist())
    return found


@dataclass(frozen=True, kw_only=True)
class Played:
    """What a group of workers was given."""

    epochs: dict[int, Given]
    state: dict[str, torch.Tensor]
    """After the last batch, the same on all workers."""


def play(
    make: Make,
    *,
    world_size: int,
    length: Length,
    start: Trained | None = None,
    state: dict[str, torch.Tensor] | None = None,
    until: tuple[int, int] | None = None,
) -> Played:
    """Run a group to the end, or to that many steps of that epoch."""
    begin = start or Trained()
    last = until[0] if until else length.epochs - 1

    def worker_ids(
        worker: ThreadWorker,
    ) -> tuple[dict[int, list[list[int]]], dict[str, torch.Tensor]]:
        batches = make(begin, state or {}, worker)
        found = {}
        for epoch in range(begin.epoch, last + 1):
            done = begin.steps_in_epoch if epoch == begin.epoch else 0
            steps = until[1] - done if until and epoch == last else None
            found[epoch] = ids_of(islice(batches.epoch(epoch), steps))
        return found, batches.state()

    results = Group(world_size).run(worker_ids)
    states = [state for _, state in results]
    for other in states[1:]:
        assert states[0].keys() == other.keys()
        assert all(torch.equal(states[0][key], other[key]) for key in other)
    epochs = {epoch: [found[epoch] for found, _ in results] for epoch in results[0][0]}
    return Played(epochs=epochs, state=states[0])


def flat(given: Given) -> list[int]:
    return list(chain.from_iterable(chain.from_iterable(given)))


def global_batches(given: Given) -> list[list[int]]:
    """What all workers together learn from in each step."""
    return [list(chain.from_iterable(parts)) for parts in zip(*given, strict=True)]


def check_shares(given: Given, length: Length, steps: range | None = None) -> None:
    """Each worker has as many batches as any other, each shared as evenly as can be."""
    for rank, batches in enumerate(given):
        due = [
            len(np.array_split(np.arange(length.batch_size(step)), len(given))[rank])
            for step in steps or range(length.steps_per_epoch)
        ]
        assert [len(batch) for batch in batches] == due


def check_used(ids: list[int], length: Length) -> None:
    """An epoch: no sample twice, and none left out but those that fill no batch."""
    assert len(ids) == len(set(ids)) == length.samples_per_epoch
    assert set(ids) <= set(range(length.num_samples))
