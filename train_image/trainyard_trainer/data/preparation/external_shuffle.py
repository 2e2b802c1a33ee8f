"""A shuffle of more rows than fit into memory, by way of sorted chunks.

A sorted chunk is an Arrow file that holds some rows of the source, with one record batch for each Parquet
file of the split. Each Parquet file is then assembled from its batches in all chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from trainyard_trainer.data.preparation.convert import Converted
from trainyard_trainer.run_folder.folder import RunFolder

SCHEMA = pa.schema([("position", pa.int64()), ("image", pa.binary())])


def pack_chunk(
    found: Converted, positions: np.ndarray, file_of: np.ndarray, num_files: int
) -> bytes:
    """Return a sorted chunk of converted images.

    `positions` has the position of each row in the split, `file_of` the number of its Parquet file.
    """
    positions, file_of = positions[found.indices], file_of[found.indices]
    order = np.argsort(file_of, kind="stable")
    ends = np.searchsorted(file_of[order], np.arange(num_files), side="right").tolist()
    output = pa.BufferOutputStream()
    with pa.ipc.new_file(output, SCHEMA) as writer:
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            chosen = order[start:end]
            images = found.values.take(pa.array(chosen))
            columns = [pa.array(positions[chosen]), images]
            writer.write_batch(pa.record_batch(columns, schema=SCHEMA))
    return output.getvalue().to_pybytes()


class SortedRows(NamedTuple):
    """The rows of one Parquet file, in the order of their positions."""

    positions: np.ndarray
    """The positions of the rows in the split."""
    values: pa.Array


class SortedChunks:
    """All sorted chunks of a split."""

    def __init__(self, dest: RunFolder, files: Sequence[str]) -> None:
        self._dest = dest
        self._files = files

    def take(self, number: int) -> SortedRows:
        """Return the rows of the Parquet file with this number."""
        table = pa.Table.from_batches(self._batches(number), SCHEMA)
        positions = table["position"].to_numpy()
        order = np.argsort(positions)
        chunks = table["image"].chunks
        images = pa.concat_arrays(chunks) if chunks else pa.array([], pa.binary())
        return SortedRows(positions[order], images.take(pa.array(order)))

    def _batches(self, number: int) -> Iterator[pa.RecordBatch]:
        for file in self._files:
            path = f"{self._dest.root}/{file}"
            with (
                self._dest.explained("read", path),
                self._dest.filesystem.open_input_file(path) as stream,
            ):
                batch = pa.ipc.open_file(stream).get_batch(number)
            yield batch
