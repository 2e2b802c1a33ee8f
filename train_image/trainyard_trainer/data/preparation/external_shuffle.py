"""A shuffle of more rows than memory holds, by way of runs: rows as they come, sorted by the files they fill.

A run is an Arrow file with a record batch for each file of the part; a file of the part is put together from
its batches in all runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from trainyard_trainer.data.preparation.convert import Converted
from trainyard_trainer.run_folder.folder import RunFolder

SCHEMA = pa.schema([("position", pa.int64()), ("image", pa.binary())])


def pack_run(found: Converted, positions: np.ndarray, file_of: np.ndarray, num_files: int) -> bytes:
    """Images that were converted; `positions` and `file_of` are where each of the rows goes."""
    positions, file_of = positions[found.places], file_of[found.places]
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


class Gathered(NamedTuple):
    """The rows of a file, in order."""

    positions: np.ndarray
    """In the part."""
    values: pa.Array


class Runs:
    """All runs of a part."""

    def __init__(self, dest: RunFolder, files: Sequence[str]) -> None:
        self._dest = dest
        self._files = files

    def take(self, number: int) -> Gathered:
        """The rows of a file of the part."""
        table = pa.Table.from_batches(self._batches(number), SCHEMA)
        positions = table["position"].to_numpy()
        order = np.argsort(positions)
        chunks = table["image"].chunks
        images = pa.concat_arrays(chunks) if chunks else pa.array([], pa.binary())
        return Gathered(positions[order], images.take(pa.array(order)))

    def _batches(self, number: int) -> Iterator[pa.RecordBatch]:
        for file in self._files:
            path = f"{self._dest.root}/{file}"
            with self._dest.filesystem.open_input_file(path) as stream:
                yield pa.ipc.open_file(stream).get_batch(number)
