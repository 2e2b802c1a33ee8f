"""Read training samples from Parquet, a few row groups at a time, in a task of the Ray loader.

torch is imported only to decode files, since its import takes seconds in each process that runs tasks.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import accumulate

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainyard_trainer.data.prepared import ID, DatasetInfo, Prepared, PreparedInfo
from trainyard_trainer.data.sources.listing import explained_errors
from trainyard_trainer.data.stored_rows import DECODER, without_files


def read_part(
    prepared: Prepared, wanted: np.ndarray | None, *, file: str, part: int, parts: int
) -> pa.Table:
    """Read one of several parts of a file: the samples whose bit is set, or all if `wanted` is None."""
    with explained_errors(file), prepared.open_filesystem().open_input_file(file) as stream:
        parquet = pq.ParquetFile(stream, pre_buffer=True)
        groups = parquet.num_row_groups
        chosen = range(groups * part // parts, groups * (part + 1) // parts)
        table = parquet.read_row_groups(chosen, columns=prepared.info.stored)
    if wanted is not None:
        table = table.filter(pa.array(np.unpackbits(wanted)[table[ID].to_numpy()] == 1))
    return decoded(table, prepared.info)


def read_sample(prepared: Prepared, sample: int) -> pa.Table:
    """Read and decode one training sample."""
    ends = list(accumulate(prepared.train.rows))
    index = int(np.searchsorted(ends, sample, side="right"))
    row = sample - (ends[index] - prepared.train.rows[index])
    file = prepared.train.files[index]
    with explained_errors(file), prepared.open_filesystem().open_input_file(file) as stream:
        parquet = pq.ParquetFile(stream)
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if row < rows:
                break
            row -= rows
        table = parquet.read_row_group(group, columns=prepared.info.stored)
    return decoded(table.slice(row, 1), prepared.info)


def decoded(table: pa.Table, info: PreparedInfo) -> pa.Table:
    """Return the same rows without metadata, and with decoded values instead of files."""
    if isinstance(info, DatasetInfo) and info.encoding == "encoded":
        import_whole(DECODER)
        table = without_files(table, info)
    return table.replace_schema_metadata(None)


def import_whole(module: str) -> None:
    """Import a module, and torch with it, so that a cancelled task does not leave it half imported.

    Ray cancels a task by an exception at any line of its main thread and reuses the process. torch
    cannot be imported a second time there after such an exception. The thread ends its import in any case.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(import_module, module).result()
