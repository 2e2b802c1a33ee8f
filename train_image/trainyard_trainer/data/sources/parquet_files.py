"""Parquet files of a source: which they are, how they are opened, and the columns that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from trainyard_trainer.data.sources.listing import explained_errors
from trainyard_trainer.errors import ConfigError

SUFFIX = ".parquet"

INDEX = re.compile(r"__index_level_\d+__|Unnamed: \d+(\.\d+)?|")
"""Names of columns that are the index of a data frame: pandas' own in Parquet, and those that an index
without a name gets on the way through CSV, among them the empty name."""

RESET_INDEX = re.compile(r"index|level_\d+")
"""Names that `reset_index` of a data frame gives its index. Columns of integers with such names are one."""

VERSIONED = {"_delta_log": "Delta", ".hoodie": "Hudi"}
"""Folders of table formats whose Parquet files hold rows that were deleted or replaced since."""


def is_parquet(name: str) -> bool:
    return name.lower().endswith(SUFFIX)


def parquet_files(
    filesystem: fs.FileSystem, root: str, infos: Sequence[fs.FileInfo]
) -> list[fs.FileInfo]:
    """Return the Parquet files among the files of a source, ordered by path.

    A folder's own name does not matter. Files and folders whose names begin with `_`, such as `_temporary`,
    are left out, as Spark and pyarrow do. Raises ConfigError for a table of Delta, Hudi or Iceberg.
    """
    found = [
        info
        for info in infos
        if info.type == fs.FileType.File
        and is_parquet(info.base_name)
        and not is_left_out(info.path, root)
    ]
    if found:
        refuse_versioned(filesystem, root, infos)
    return sorted(found, key=lambda info: info.path)


def is_left_out(path: str, root: str) -> bool:
    """Return whether a file, or a folder that it is in, has a name with `_` at the beginning."""
    parts = path.removeprefix(f"{root}/").split("/")
    return any(part.startswith("_") and "=" not in part for part in parts)


def refuse_versioned(filesystem: fs.FileSystem, root: str, infos: Sequence[fs.FileInfo]) -> None:
    """Raise ConfigError for a folder that is a table of Delta, Hudi or Iceberg."""
    names = {part for info in infos for part in info.path.removeprefix(f"{root}/").split("/")}
    formats = [name for folder, name in VERSIONED.items() if folder in names]
    hidden = filesystem.get_file_info([f"{root}/{folder}" for folder in VERSIONED])
    formats += [VERSIONED[info.base_name] for info in hidden if info.type == fs.FileType.Directory]
    if any(info.path.endswith(".metadata.json") and "/metadata/" in info.path for info in infos):
        formats.append("Iceberg")
    if formats:
        raise ConfigError(
            f"{root} is a table in the format of {formats[0]}: its Parquet files may hold rows that were "
            "deleted or replaced since. Write the current rows as plain Parquet files, and name their folder."
        )


@contextmanager
def opened(filesystem: fs.FileSystem, path: str) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file for a while. Raises ConfigError or RunError, which name the file.

    The name of a column that is not UTF-8 is refused here, since pyarrow reads all names at once.
    """
    with explained_errors(path), filesystem.open_input_file(path) as stream:
        try:
            file = pq.ParquetFile(stream)
        except UnicodeDecodeError as error:
            shown = bytes(error.object).decode("utf-8", "backslashreplace")
            raise ConfigError(
                f"{path} has a column whose name is not UTF-8: {shown}. Rename the column."
            ) from None
        yield file


def index_columns(schema: pa.Schema) -> set[str]:
    """Return the columns that are the index of the data frame that a file was written from."""
    noted = json.loads((schema.metadata or {}).get(b"pandas", b"{}")).get("index_columns", [])
    named = {name for name in noted if isinstance(name, str)}
    return {
        field.name
        for field in schema
        if field.name in named
        or INDEX.fullmatch(field.name)
        or (RESET_INDEX.fullmatch(field.name) and pa.types.is_integer(field.type))
    }
