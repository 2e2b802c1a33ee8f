"""Batches from Ray Data: read and decoded by tasks anywhere in the cluster, streamed to the workers."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import ray
import ray.data

from trainer.config import Data
from trainer.data.parquet import decode
from trainer.data.sources import Prepared
from trainer.data.torch_loader import Batch
from trainer.errors import RunError
from trainer.folder import RunFolder

SHUFFLE_ROWS = 16_384
"""Rows among which a worker shuffles at most."""

MATERIALISE_SHARE = 0.25
"""Decoded images that fill no more of the object store than this are kept there between epochs."""


def read_training_data(data: Data, folder: RunFolder, prepared: Prepared) -> ray.data.Dataset:
    """The training images as a Ray data set, decoded block by block."""
    images = prepared.images

    def decode_block(table: pa.Table) -> dict:
        columns = decode(table, images)
        return {"image": columns["image"], "label": columns["label"]}

    dataset = ray.data.read_parquet(
        folder.train_data,
        filesystem=folder.filesystem,
        shuffle="files" if data.shuffle else None,
    ).map_batches(decode_block, batch_size=None, batch_format="pyarrow")
    store = ray.cluster_resources().get("object_store_memory", 0)
    if prepared.num_train * images.bytes_per_image <= store * MATERIALISE_SHARE:
        return dataset.materialize()
    return dataset


class RayBatches:
    """Training batches of one worker from its shard of a Ray data set."""

    def __init__(
        self,
        shard: ray.data.DataIterator,
        *,
        steps_per_epoch: int,
        batch_size: int,
        shuffle: bool,
        seed: int,
        pin_memory: bool,
    ) -> None:
        self.shard = shard
        # A shard has the rows divided by the workers, rounded down: just enough for these steps.
        self.steps_per_epoch = steps_per_epoch
        self.batch_size = batch_size
        self.shuffle_rows = min(SHUFFLE_ROWS, steps_per_epoch * batch_size) if shuffle else None
        self.seed = seed
        self.pin_memory = pin_memory

    def epoch(self, epoch: int) -> Iterator[Batch]:
        batches = self.shard.iter_torch_batches(
            batch_size=self.batch_size,
            drop_last=True,
            prefetch_batches=4,
            pin_memory=self.pin_memory,
            local_shuffle_buffer_size=self.shuffle_rows,
            local_shuffle_seed=self.seed + epoch if self.shuffle_rows else None,
        )
        steps = 0
        for batch in batches:
            if steps == self.steps_per_epoch:
                return
            yield batch["image"], batch["label"]
            steps += 1
        if steps < self.steps_per_epoch:
            raise RunError(
                f"Ray Data gave {steps} batches of {self.batch_size} in epoch {epoch} where "
                f"{self.steps_per_epoch} were due. Use data.loader: torch, or look for lost "
                "blocks in the log."
            )
