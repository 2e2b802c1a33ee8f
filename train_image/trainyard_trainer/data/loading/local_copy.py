"""A copy of a split on the local disk, with random access to its rows, which all processes of a machine map.

Parquet can be read only by row group, and is compressed. So the first process that needs a split copies it
into the machine's scratch folder, and every process maps that copy. The page cache holds it once, or as much
of it as fits.

    <scratch>/trainyard-data-<user>/<fingerprint>/
        <column>            the values of a column, one after the other
        <column>.offsets    the offsets of values whose sizes differ, and the end
        complete            written last; a copy without it is incomplete

Each process that uses a copy holds a shared lock on its folder, which the system releases when the process
ends. A copy without a lock is not in use. The last process that releases it removes it, and so does a process
that opens another copy later.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet as pq
import torch
from torch.utils.data import Dataset

from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.chunks import copied
from trainyard_trainer.data.prepared import ID, DataColumn, Prepared, Split
from trainyard_trainer.data.sources.listing import explained_errors
from trainyard_trainer.data.stored_rows import decode
from trainyard_trainer.errors import ConfigError, RunError

GIB = 2**30

TRY_AGAIN_S = 0.05

COMPLETE = "complete"
"""The empty file that is written last."""


class LocalCopy(Dataset[Batch]):
    """A split whose items are whole batches, by their indices. It is pickled as a path."""

    def __init__(self, prepared: Prepared, split: Split, *, is_pinned: bool = False) -> None:
        self.info = prepared.info
        self.count = split.count
        self.is_pinned = is_pinned
        self.folder = folder_of(prepared, split)
        remove_unused_but(self.folder)
        lock = lock_copy(prepared, split, self.folder)
        weakref.finalize(self, _leave, lock, self.folder)
        self._map()

    def __getstate__(self) -> dict[str, Any]:
        # A process that does not use CUDA cannot pin memory.
        known = {"info": self.info, "count": self.count, "folder": self.folder}
        return known | {"is_pinned": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._map()

    def _map(self) -> None:
        self.ids = np.arange(self.count)
        self.arrays: dict[str, np.ndarray] = {}
        self.files: dict[str, pa.Array] = {}
        for name, column in self.info.columns.items():
            with (self.folder / name).open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            if not column.is_encoded:
                self.arrays[name] = np.frombuffer(data, column.dtype).reshape(-1, *column.shape)
                continue
            offsets = np.load(self.folder / f"{name}.offsets", mmap_mode="r")
            # One chunk: pyarrow copies the whole column to take rows of several chunks.
            buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
            self.files[name] = pa.Array.from_buffers(pa.large_binary(), self.count, buffers)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, indices: np.ndarray) -> Batch:
        if not self.files:
            columns = {**self.arrays, ID: self.ids}
            return copied(columns, indices, is_pinned=self.is_pinned)
        arrays = {name: array[indices] for name, array in self.arrays.items()}
        files = {name: file.take(pa.array(indices)) for name, file in self.files.items()}
        known = self.info.columns
        stored = {known[name].stored: values for name, values in (arrays | files).items()}
        decoded = decode(pa.table({ID: indices, **stored}), self.info) | arrays
        return Batch(
            {name: torch.from_numpy(decoded[name]) for name in known}, torch.from_numpy(indices)
        )


# The copy's place.


def folder_of(prepared: Prepared, split: Split) -> Path:
    """Return the folder of the copy of a split; it follows from the files, their sizes and their times."""
    with explained_errors(prepared.path):
        infos = prepared.open_filesystem().get_file_info(list(split.files))
    files = [(info.path, info.size, info.mtime_ns) for info in infos]
    known = repr((prepared.path, prepared.endpoint, astuple(prepared.info), split.rows, files))
    fingerprint = hashlib.sha256(known.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"trainyard-data-{os.getuid()}", fingerprint)


def lock_copy(prepared: Prepared, split: Split, folder: Path) -> int:
    """Return a shared lock on a complete copy. If there is none, one process makes it and the others wait."""
    while True:
        lock = _lock(folder, fcntl.LOCK_SH)
        if is_complete(folder):
            return lock
        os.close(lock)
        # Without waiting: a process that has made the copy meanwhile holds a shared lock while it trains.
        try:
            lock = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(TRY_AGAIN_S)
            continue
        try:
            if not is_complete(folder):
                write_copy(prepared, split, folder)
        finally:
            os.close(lock)


def is_complete(folder: Path) -> bool:
    return (folder / COMPLETE).exists()


def _lock(folder: Path, mode: int) -> int:
    """Create and lock the folder of a copy. Raises BlockingIOError if the mode forbids waiting."""
    while True:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(
            FileExistsError
        ):  # exist_ok fails if another process removes it at this moment
            folder.mkdir(mode=0o700)
        lock = _open(folder)
        if lock is None:
            continue
        try:
            fcntl.flock(lock, mode)
        except BlockingIOError:
            os.close(lock)
            raise
        if _is_at(lock, folder):
            return lock
        os.close(lock)  # removed while we waited


def _open(folder: Path) -> int | None:
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None


def _is_at(lock: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), folder.stat())
    except FileNotFoundError:
        return False


def remove_unused_but(folder: Path) -> None:
    """Remove other copies that killed processes have left behind."""
    if folder.parent.exists():
        for other in folder.parent.iterdir():
            if other != folder:
                remove_unless_used(other)


def remove_unless_used(folder: Path) -> None:
    lock = _open(folder)
    if lock is None:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(lock, folder):
            shutil.rmtree(folder)
    except BlockingIOError:
        return
    finally:
        os.close(lock)


def _leave(lock: int, folder: Path) -> None:
    os.close(lock)
    remove_unless_used(folder)


# The copy's bytes.


def write_copy(prepared: Prepared, split: Split, folder: Path) -> None:
    """Write the copy of a split. Raises ConfigError for a full disk, and RunError for damaged data."""
    needed = bytes_of(prepared, split)
    check_room(needed, prepared, folder)
    columns = prepared.info.columns
    offsets = {name: [np.zeros(1, np.int64)] for name in columns if columns[name].is_encoded}
    try:
        with ExitStack() as stack:
            files = {name: stack.enter_context((folder / name).open("wb")) for name in columns}
            for table in read_in_order(prepared, split):
                for name, column in columns.items():
                    for values in table[column.stored].chunks:
                        data, sizes = _bytes_in(values, column)
                        files[name].write(data)
                        if name in offsets:
                            offsets[name].append(sizes)
        for name, sizes_of_parts in offsets.items():
            with (folder / f"{name}.offsets").open("wb") as file:
                np.save(file, np.cumsum(np.concatenate(sizes_of_parts)))
        (folder / COMPLETE).touch()
    except OSError as error:
        shutil.rmtree(folder)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            check_room(needed, prepared, folder, free=0)
        raise


def _tables(prepared: Prepared, split: Split) -> Iterator[pa.Table]:
    with explained_errors(prepared.path):
        files = pyarrow.dataset.dataset(
            list(split.files), format="parquet", filesystem=prepared.open_filesystem()
        )
        batches = files.to_batches(columns=prepared.info.stored)
    while True:
        with explained_errors(prepared.path):
            batch = next(batches, None)
        if batch is None:
            return
        yield pa.Table.from_batches([batch])


def read_in_order(prepared: Prepared, split: Split) -> Iterator[pa.Table]:
    """Read all rows, a few at a time, and check that their ids are in order."""
    rows = 0
    for table in _tables(prepared, split):
        if prepared.info.encoding == "raw":
            decode(table.slice(), prepared.info)
        due = np.arange(rows, rows + len(table))
        if not np.array_equal(table[ID].to_numpy(), due):
            raise RunError(
                f"{prepared.path}: after {rows:,} samples the ids are not {rows:,}, {rows + 1:,} and so on. "
                "Prepare the data again: trainyard data prepare."
            )
        rows += len(table)
        yield table
    if rows != split.count:
        raise RunError(
            f"{prepared.path} has {rows:,} samples where its dataset.json counts {split.count:,}. "
            "Prepare the data again: trainyard data prepare."
        )


def _bytes_in(values: pa.Array, column: DataColumn) -> tuple[pa.Buffer, np.ndarray]:
    """Return the bytes of all values, one after the other, and the size of each. Tokens become int32."""
    if not column.shape:
        return pa.py_buffer(values.to_numpy()), np.full(len(values), column.bytes)
    sizes = pc.binary_length(values).to_numpy().astype(np.int64)
    offset_type = np.int64 if pa.types.is_large_binary(values.type) else np.int32
    _, offsets, data = values.buffers()
    start = int(np.frombuffer(offsets, offset_type)[values.offset])
    data = data.slice(start, int(sizes.sum()))
    if column.stored_dtype is not None:
        data = pa.py_buffer(np.frombuffer(data, column.numbers).astype(column.dtype))
    return data, sizes


def bytes_of(prepared: Prepared, split: Split) -> int:
    """Return the size of the copy of a split."""
    columns = prepared.info.columns.values()
    total = sum(split.count * column.bytes for column in columns if not column.is_encoded)
    encoded = [column.stored for column in columns if column.is_encoded]
    if not encoded:
        return total
    filesystem = prepared.open_filesystem()
    for path in split.files:
        with explained_errors(path), filesystem.open_input_file(path) as file:
            footer = pq.ParquetFile(file).metadata
        names = footer.schema.to_arrow_schema().names
        total += sum(
            footer.row_group(group).column(names.index(name)).total_uncompressed_size
            for group in range(footer.num_row_groups)
            for name in encoded
        )
    return total


def check_room(needed: int, prepared: Prepared, folder: Path, free: int | None = None) -> None:
    if free is None:
        free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"the torch loader copies {prepared.path} to {folder.parent.parent} and needs "
            f"{needed / GIB:.1f} GiB there; {free / GIB:.1f} GiB are free. Use data.loader: ray, "
            "which needs no copy, or set TMPDIR to a larger disk."
        )
