"""Data sets of Lance: how they are named, which version is read, and how their rows are read in groups.

A data set of Lance is a folder whose name ends in `.lance`. Each change of it is a new version. A program
reads one version from its beginning to its end, whatever others write meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from trainyard_trainer.data.sources.column_types import without_views
from trainyard_trainer.data.sources.listing import explained_errors
from trainyard_trainer.data.sources.parts import stamp_of
from trainyard_trainer.errors import ConfigError, RunError

if TYPE_CHECKING:
    from lance import LanceDataset, LanceFragment

SUFFIX = ".lance"

VERSIONS = "_versions"
"""The folder in each data set that has a file for each of its versions."""

ADDRESS = re.compile(r"(?P<path>.+\.lance)@(?P<version>[^/@]+)")
"""A source with a version: its number, or a tag."""

GROUP_BYTES = 2**23
"""The size of a group of rows of a fragment that is larger, about."""

PROBED_ROWS = 64
"""The number of rows that are read to find out how much larger values are in memory than in their file."""

METADATA_BYTES = 2**26
"""The memory for what a process keeps of the metadata of files; Lance's own limit is a gibibyte."""

BLOB = "lance.blob.v2"
"""The name of the extension type of columns whose values lie apart, and are read as bytes."""

STORAGE_FAILURE = re.compile(r"Generic S3 error|error sending request|timed out", re.IGNORECASE)
"""What messages of Lance have in them if the storage cannot be reached."""

MISSING_FILE = re.compile(r"Not found: (?P<path>[^,]+)")
"""What messages of Lance have in them if a file is gone."""

SOURCE_CODE = re.compile(r",? /\S+\.rs:\d+:\d+")
"""Where in Lance's source code an error arose, as its messages tell."""

WRAPPERS = re.compile(
    r"^(External error: |Wrapped error: |LanceError\(\w+\): |Generic [\w/]+ error: )+"
)
"""The kinds of errors that messages of Lance begin with."""


class LanceVersion(NamedTuple):
    """A version of a data set."""

    number: int
    stamp: str
    """A fingerprint of its files: a data set that is written anew begins with version 1 again."""


def split_version(source: str) -> tuple[str, str | None]:
    """Return the path of a source and the version that stands behind it.

    >>> split_version("/mnt/data/photos.lance@12")
    ('/mnt/data/photos.lance', '12')
    """
    match = ADDRESS.fullmatch(source.rstrip("/"))
    return (match["path"], match["version"]) if match else (source, None)


def lance_folders(root: str, infos: Sequence[fs.FileInfo]) -> list[str]:
    """Return the paths of the data sets among the files and folders below a root, or the root itself.

    Raises ConfigError for a data set whose name does not end in `.lance`.
    """
    folders = [
        str(PurePosixPath(info.path).parent)
        for info in infos
        if info.type == fs.FileType.Directory and info.base_name == VERSIONS
    ]
    names = [info.path for info in infos if info.base_name.endswith(SUFFIX)]
    for folder in folders:
        is_known = folder.endswith(SUFFIX)
        if not is_known and any(name.startswith(f"{folder}/") for name in names):
            raise ConfigError(
                f"{folder} is a data set of Lance whose name does not end in {SUFFIX}: with an ending it is "
                f"known as one. Rename it: {folder}{SUFFIX}"
            )
    return sorted(folder for folder in folders if folder.endswith(SUFFIX))


def is_dataset(filesystem: fs.FileSystem, path: str) -> bool:
    """Return whether a data set of Lance is at a path."""
    if not path.endswith(SUFFIX):
        return False
    with explained_errors(path):
        info = filesystem.get_file_info(f"{path}/{VERSIONS}")
    return bool(info.type == fs.FileType.Directory)


def require_lance() -> None:
    """Raise ConfigError if the package that reads data sets of Lance is not installed."""
    if find_spec("lance") is None:
        raise ConfigError(
            "data sets of Lance are read by the package pylance, which is not installed here.\n"
            "       pip install 'trainyard[lance]'"
        )


def open_dataset(
    filesystem: fs.FileSystem,
    path: str,
    shown: str,
    *,
    endpoint: str | None,
    version: str | LanceVersion | None = None,
) -> LanceDataset:
    """Open a version of a data set: one of a number or tag, one that was read before, or the newest.

    `path` is in the words of the filesystem, and `shown` is what messages call it. Raises ConfigError if
    there is no such version, and RunError if the storage cannot be reached.
    """
    require_lance()
    import lance  # takes a second, and only these sources need it

    wanted: int | str | None = version.number if isinstance(version, LanceVersion) else version
    if isinstance(wanted, str) and wanted.isdecimal():
        wanted = int(wanted)
    if not is_dataset(filesystem, path):
        raise ConfigError(
            f"{shown} is no data set of Lance, which is a folder with {VERSIONS}/ in it. Name such a folder, "
            "or copy all of it."
        )
    options = None
    if isinstance(filesystem, fs.S3FileSystem):
        path, options = f"s3://{path}", _storage_options(filesystem, endpoint)
    with _explained(shown, wanted):
        dataset = lance.dataset(
            path,
            version=wanted,
            storage_options=options,
            metadata_cache_size_bytes=METADATA_BYTES,
        )
        found = version_of(dataset)
    if isinstance(version, LanceVersion) and found.stamp != version.stamp:
        raise ConfigError(
            f"version {found.number} of {shown} has other files than when the run began: the data set was "
            "written anew. Restore it, or begin a new run: another name, or --fresh."
        )
    return dataset


def _storage_options(filesystem: fs.S3FileSystem, endpoint: str | None) -> dict[str, str]:
    """Return the options of a bucket. Keys come from the environment, as they do for pyarrow."""
    options = {
        "aws_region": filesystem.region,
        "allow_http": "true",
    }  # the endpoint says what is spoken
    return options | ({"aws_endpoint": endpoint.rstrip("/")} if endpoint else {})


def version_of(dataset: LanceDataset) -> LanceVersion:
    """Return which version of a data set was opened."""
    files = [
        (
            [file.path for file in fragment.metadata.files],
            fragment.physical_rows,
            fragment.num_deletions,
        )
        for fragment in dataset.get_fragments()
    ]
    return LanceVersion(int(dataset.version), stamp_of(files))


@contextmanager
def _explained(shown: str, version: int | str | None = None) -> Iterator[None]:
    """Turn what Lance raises into typed errors that name the data set.

    Its errors are ValueError, OSError and those of Arrow, with little system, so their texts decide.
    """
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:  # Arrow's own are of these, too
        text = str(error).partition("\n")[0]
        reason = SOURCE_CODE.sub("", WRAPPERS.sub("", text)).rstrip(" .,")
        if STORAGE_FAILURE.search(text):
            raise RunError(
                f"{shown} cannot be read: {reason}. Check that the storage of data.source can be reached."
            ) from error
        if version is not None and (f"{VERSIONS}/" in text or "Ref not found" in text):
            raise ConfigError(
                f"{shown} has no version {version}: it was removed, or never written. Use another version, "
                "or begin a new run with the newest one: another name, or --fresh."
            ) from error
        if (missing := MISSING_FILE.search(text)) is not None:
            raise ConfigError(
                f"{shown}: {PurePosixPath(missing['path']).name} is missing, a file of the version that "
                "is read. If it was removed with an old version (cleanup_old_versions), begin a new run. "
                "Otherwise copy the data set again."
            ) from error
        raise ConfigError(
            f"{shown} is no intact data set of Lance: {reason}. Write it again, or copy it again."
        ) from error


class LanceTable:
    """A version of a data set whose rows are read in groups; deleted rows are left out.

    A group is a fragment, or neighbouring rows of about GROUP_BYTES of a larger fragment. The groups depend
    on the version alone.
    """

    def __init__(
        self, filesystem: fs.FileSystem, dataset: LanceDataset, path: str, shown: str
    ) -> None:
        self.path = shown
        self.schema = pa.schema(
            [
                pa.field(field.name, pa.large_binary(), field.nullable) if is_blob(field) else field
                for field in dataset.schema
            ],
            dataset.schema.metadata,
        )
        self._filesystem = filesystem
        self._folder = path
        self._blobs = [field.name for field in dataset.schema if is_blob(field)]
        with _explained(shown):
            self.version = version_of(dataset)
            counted = [(each, each.count_rows()) for each in dataset.get_fragments()]
        self._fragments = [(fragment, rows) for fragment, rows in counted if rows]
        self.num_rows = sum(rows for _, rows in counted)

    @property
    def group_ends(self) -> np.ndarray:
        """The number of the row behind each group."""
        return np.cumsum([group.rows for group in self._groups] or [0])

    @property
    def group_bytes(self) -> np.ndarray:
        """The size of each group in memory, of all columns, about, in bytes."""
        return np.array([group.num_bytes for group in self._groups], np.int64)

    def read_group(self, group: int, columns: Sequence[str]) -> pa.Table:
        """Read columns of a group. Raises ConfigError for a damaged file, and RunError for a lost storage."""
        found = self._groups[group]
        return self._read(found.fragment, found.first, found.rows, columns)

    def batches(self, rows: int) -> Iterator[pa.RecordBatch]:
        """Yield all columns of all rows, at most so many rows at a time."""
        for group in range(len(self._groups)):
            yield from self.read_group(group, self.schema.names).to_batches(max_chunksize=rows)

    def first(self, count: int, columns: Sequence[str]) -> pa.Table:
        """Read columns of the first rows."""
        tables = [pa.schema([self.schema.field(name) for name in columns]).empty_table()]
        for fragment, rows in self._fragments:
            if count:
                tables.append(self._read(fragment, 0, min(count, rows), columns))
                count -= len(tables[-1])
        return pa.concat_tables(tables)

    def column(self, name: str) -> pa.ChunkedArray:
        """Read a whole column into memory."""
        return self.first(self.num_rows, [name]).column(0)

    @cached_property
    def _groups(self) -> list[_Group]:
        expansion = self._expansion()
        groups = []
        for fragment, rows in self._fragments:
            # Deleted rows stay in the files.
            stored = self._file_bytes(fragment) * rows / fragment.physical_rows
            num_bytes = int(stored * expansion) + self._blob_bytes(fragment)
            parts = min(rows, max(1, -(-num_bytes // GROUP_BYTES)))
            ends = [rows * (part + 1) // parts for part in range(parts)]
            for first, end in zip([0, *ends[:-1]], ends, strict=True):
                size = num_bytes * (end - first) // rows
                groups.append(_Group(fragment, first, end - first, size))
        return groups

    def _file_bytes(self, fragment: LanceFragment) -> int:
        """Return the size of a fragment's files in bytes. Manifests of old releases lack it."""
        return sum(
            file.file_size_bytes
            or self._filesystem.get_file_info(f"{self._folder}/data/{file.path}").size
            or 0
            for file in fragment.metadata.files
        )

    def _expansion(self) -> float:
        """Return how much larger rows are in memory than in their file, by the first rows; at least 1."""
        columns = [name for name in self.schema.names if name not in self._blobs]
        if not columns or not self._fragments:
            return 1.0
        fragment, rows = self._fragments[0]
        probed = self._read(fragment, 0, min(rows, PROBED_ROWS), columns)
        stored = self._file_bytes(fragment) / fragment.physical_rows
        return max(1.0, probed.nbytes / len(probed) / stored) if stored else 1.0

    def _blob_bytes(self, fragment: LanceFragment) -> int:
        """Return the size of the values that may lie in files of their own."""
        total = 0
        for name in self._blobs:
            with _explained(self.path):
                found = fragment.scanner(columns=[name], blob_handling="blobs_descriptions")
                places = found.to_table().column(0)
            total += pc.sum(pc.struct_field(places, "size")).as_py() or 0
        return total

    def _read(
        self, fragment: LanceFragment, first: int, count: int, columns: Sequence[str]
    ) -> pa.Table:
        with _explained(self.path):
            found = fragment.scanner(
                columns=list(columns), offset=first, limit=count, blob_handling="all_binary"
            ).to_table()
        values = [without_views(found.column(name)) for name in columns]
        return pa.table(values, pa.schema([self.schema.field(name) for name in columns]))


class _Group(NamedTuple):
    """Neighbouring rows of a fragment."""

    fragment: LanceFragment
    first: int
    """The number of its first row among those of the fragment that are not deleted."""
    rows: int
    num_bytes: int
    """Its size in memory, about."""


def is_blob(field: pa.Field) -> bool:
    """Return whether the values of a column may lie in files of their own; they are read as bytes."""
    return isinstance(field.type, pa.BaseExtensionType) and field.type.extension_name == BLOB
