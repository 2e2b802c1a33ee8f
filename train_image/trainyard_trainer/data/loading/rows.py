"""The splits of a run's data set as map-style data sets whose items are whole batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from torch.utils.data import Dataset, Sampler
from typing_extensions import assert_never

from trainyard_trainer.data.loading.batch import Batch, BatchRequest
from trainyard_trainer.data.loading.chunks import copied
from trainyard_trainer.data.loading.local_copy import LocalCopy
from trainyard_trainer.data.loading.reading import read_sample
from trainyard_trainer.data.loading.shard_rows import ShardRows
from trainyard_trainer.data.loading.stream_order import Stream, StreamOrder
from trainyard_trainer.data.loading.user_dataset import (
    Collate,
    SplitName,
    UserDataInfo,
    UserDataset,
    UserRows,
    stacked,
)
from trainyard_trainer.data.prepared import (
    Prepared,
    PreparedInfo,
    prepared_info_of_json,
)
from trainyard_trainer.data.sources.tokens.token_files import TokenShards
from trainyard_trainer.data.stored_rows import decode

RunData = Prepared | TokenShards | Stream | UserDataset
"""The data set of a run."""

DataInfo = PreparedInfo | UserDataInfo
"""What the samples of a data set have in common."""


def data_info_of_json(known: Mapping[str, Any]) -> DataInfo:
    """Return the info that a checkpoint's manifest holds."""
    is_prepared = "row_tokens" in known or "shape" in known
    return prepared_info_of_json(known) if is_prepared else UserDataInfo(**known)


STAND_IN_SAMPLES = 2
"""The number of samples of a stand-in batch: batch norm needs more than one."""


def open_rows(
    data: RunData, split: SplitName, *, seed: int, collate: Collate = stacked, is_pinned: bool
) -> Dataset[Batch]:
    """Open a split for this process. `seed` and `collate` are for a data set of the user."""
    match data:
        case UserDataset():
            return UserRows(data, split, seed=seed, collate=collate)
        case Prepared():
            return LocalCopy(data, getattr(data, split), is_pinned=is_pinned)
        case TokenShards():
            return ShardRows(data, split, is_pinned=is_pinned)
        case Stream():
            return data.open_rows(split)
        case _:
            assert_never(data)


def read_stand_in(data: RunData, *, seed: int = 0, collate: Collate = stacked) -> Batch:
    """Read the first training samples: a batch for a worker whose share is empty."""
    count = min(STAND_IN_SAMPLES, data.num_train)
    match data:
        case UserDataset():
            rows = UserRows(data, "train", seed=seed, collate=collate)
            return rows[BatchRequest(np.arange(count), 0)]
        case Prepared():
            table = pa.concat_tables([read_sample(data, sample) for sample in range(count)])
            columns = decode(table, data.info.decoded)
            return copied(columns, np.arange(count), is_pinned=False)
        case TokenShards():
            return ShardRows(data, "train")[np.arange(count)]
        case Stream():
            return data.open_rows("train")[np.arange(count)]
        case _:
            assert_never(data)


def stream_of(data: RunData) -> StreamOrder | None:
    """Return the order of the training samples of a stream; None if the data are not streamed."""
    match data:
        case Stream():
            return data.order
        case UserDataset():
            return data.stream
        case Prepared() | TokenShards():
            return None
        case _:
            assert_never(data)


class IndexBatches(Protocol):
    """The indices of one batch after another."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[np.ndarray]: ...


class Requests(Sampler[BatchRequest]):
    """The batches of a sampler of indices, with the epoch for random changes of the samples."""

    def __init__(self, batches: IndexBatches) -> None:
        self.batches = batches
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[BatchRequest]:
        return (BatchRequest(indices, self.epoch) for indices in self.batches)
