"""A copy of a split on the local disk, with random access to its rows, which all processes of a machine map.

Parquet can be read only by row group, and is compressed. So the first process that needs a split copies it
into the machine's scratch folder, and every process maps that copy. The page cache holds it once, or as much
of it as fits.

    <scratch>/trainyard-data-<user>/<fingerprint>/images         the bytes of the images, one after the other
    <scratch>/trainyard-data-<user>/<fingerprint>/offsets.npy    the images' offsets, and the end
    <scratch>/trainyard-data-<user>/<fingerprint>/labels.npy     written last; a copy without it is incomplete

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
from contextlib import suppress
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
from trainyard_trainer.data.prepared import Prepared, Split, decode
from trainyard_trainer.data.sources.listing import explained_errors
from trainyard_trainer.errors import ConfigError, RunError

GIB = 2**30

TRY_AGAIN_S = 0.05


class LocalCopy(Dataset[Batch]):
    """A split whose items are whole batches, by their indices. It is pickled as a path."""

    def __init__(self, prepared: Prepared, split: Split, *, is_pinned: bool = False) -> None:
        self.info = prepared.info
        self.is_pinned = is_pinned
        self.folder = folder_of(prepared, split)
        remove_unused_but(self.folder)
        lock = lock_copy(prepared, split, self.folder)
        weakref.finalize(self, _leave, lock, self.folder)
        self._map()

    def __getstate__(self) -> dict[str, Any]:
        # A process that does not use CUDA cannot pin memory.
        return {"info": self.info, "folder": self.folder, "is_pinned": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._map()

    def _map(self) -> None:
        self.labels = np.load(self.folder / "labels.npy")
        self.ids = np.arange(len(self.labels))
        with (self.folder / "images").open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        if self.info.encoding == "raw":
            self.pixels = np.frombuffer(data, np.uint8).reshape(-1, *self.info.shape)
            return
        offsets = np.load(self.folder / "offsets.npy", mmap_mode="r")
        # One chunk: pyarrow copies the whole column to take rows of several chunks.
        self.files = pa.Array.from_buffers(
            pa.large_binary(), len(self.labels), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: np.ndarray) -> Batch:
        if self.info.encoding == "raw":
            columns = self.pixels, self.labels, self.ids
            return copied(columns, indices, is_pinned=self.is_pinned)
        chosen = {
            "id": indices,
            "image": self.files.take(pa.array(indices)),
            "label": self.labels[indices],
        }
        pixels = decode(pa.table(chosen), self.info)["image"]
        return Batch(*map(torch.from_numpy, (pixels, chosen["label"], indices)))


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
    return (folder / "labels.npy").exists()


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
    labels, lengths = [], [np.zeros(1, np.int64)]
    try:
        with (folder / "images").open("wb") as file:
            for table in read_in_order(prepared, split):
                for column in table["image"].chunks:
                    lengths.append(pc.binary_length(column).to_numpy().astype(np.int64))
                    file.write(_bytes_in(column, lengths[-1]))
                labels.append(table["label"].to_numpy())
        np.save(folder / "offsets.npy", np.cumsum(np.concatenate(lengths)))
        np.save(folder / "labels.aside.npy", np.concatenate(labels))
        (folder / "labels.aside.npy").rename(folder / "labels.npy")
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
        batches = files.to_batches(columns=["id", "image", "label"])
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
        if not np.array_equal(table["id"].to_numpy(), due):
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


def _bytes_in(values: pa.Array, lengths: np.ndarray) -> pa.Buffer:
    """Return the bytes of all values, one after the other, without a copy."""
    offset_type = np.int64 if pa.types.is_large_binary(values.type) else np.int32
    _, offsets, data = values.buffers()
    start = int(np.frombuffer(offsets, offset_type)[values.offset])
    return data.slice(start, int(lengths.sum()))


def bytes_of(prepared: Prepared, split: Split) -> int:
    """Return the size of the copy of a split."""
    if prepared.info.encoding == "raw":
        return split.count * prepared.info.bytes_per_sample
    filesystem = prepared.open_filesystem()
    total = 0
    for path in split.files:
        with explained_errors(path), filesystem.open_input_file(path) as file:
            footer = pq.ParquetFile(file).metadata
        column = footer.schema.to_arrow_schema().get_field_index("image")
        groups = range(footer.num_row_groups)
        total += sum(
            footer.row_group(group).column(column).total_uncompressed_size for group in groups
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
