"""Rows of files of tokens as a map-style data set whose items are whole batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.user_dataset import SplitName
from trainyard_trainer.data.sources.tokens.token_files import TokenShards


class ShardRows(Dataset[Batch]):
    """A split of files of tokens, which every process maps into memory. It is pickled as paths."""

    def __init__(self, data: TokenShards, split: SplitName, *, is_pinned: bool = False) -> None:
        self.data = data
        self.split = split
        self.is_pinned = is_pinned
        self._map()

    def __getstate__(self) -> dict[str, Any]:
        # A process that does not use CUDA cannot pin memory.
        return {"data": self.data, "split": self.split, "is_pinned": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._map()

    def _map(self) -> None:
        files = getattr(self.data, self.split)
        self._arrays = [file.mapped() for file in files]
        self._ends = np.cumsum(self.data.rows_of(files))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, indices: np.ndarray) -> Batch:
        length = self.data.info.row_tokens
        tokens = torch.empty((len(indices), length), dtype=torch.int32, pin_memory=self.is_pinned)
        files = np.searchsorted(self._ends, indices, side="right")
        pairs = zip(files.tolist(), indices.tolist(), strict=True)
        for row, (file, index) in zip(tokens.numpy(), pairs, strict=True):
            first = (index - (int(self._ends[file - 1]) if file else 0)) * (length - 1)
            row[:] = self._arrays[file][first : first + length]
        return Batch({"tokens": tokens}, torch.from_numpy(np.asarray(indices, np.int64)))
