"""Columns in the names of folders, as Hive, Spark and pandas write them: `label=0/part-0.parquet`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from trainyard_trainer.errors import ConfigError

NULL = "__HIVE_DEFAULT_PARTITION__"
"""The value that stands for null in the name of a folder."""

INTEGER = re.compile(r"-?(0|[1-9]\d{0,17})")
FLOAT = re.compile(r"-?\d+\.\d+([eE][-+]?\d+)?")

Value = int | float | str | None


def keys_of(folders: Sequence[str]) -> dict[str, str | None]:
    """Return the columns that the names of folders hold, with their texts; None for null.

    Keys and values are URL-encoded: `city=New%20York`. Raises ConfigError for a key that comes twice, and
    for a name that does not decode to UTF-8.
    """
    found: dict[str, str | None] = {}
    for folder in folders:
        key, equals, value = folder.partition("=")
        if not equals or not key:
            continue
        try:
            key, text = unquote(key, errors="strict"), unquote(value, errors="strict")
        except UnicodeDecodeError:
            raise ConfigError(
                f"the folder {folder} does not decode to UTF-8, though it looks like a column and its value "
                "(column=value, URL-encoded). Rename it."
            ) from None
        if key in found:
            raise ConfigError(
                f"{'/'.join(folders)} has the column {key} twice in the names of its folders. Rename one."
            )
        found[key] = None if value == NULL else text
    return found


def columns_in_folders(root: str, files: Sequence[str]) -> list[dict[str, Value]]:
    """Return the columns in the folders of each file, with values of one type per column.

    The values of a column are whole numbers or decimal fractions if all are, and otherwise text. Raises
    ConfigError if some files have a column that others lack.
    """
    found = [keys_of(file.removeprefix(root).strip("/").split("/")[:-1]) for file in files]
    for file, keys in zip(files, found, strict=True):
        if keys.keys() != found[0].keys():
            differing = sorted(keys.keys() ^ found[0].keys())
            raise ConfigError(
                f"the names of folders hold columns, and {', '.join(differing)} is in only one of {files[0]} "
                f"and {file}. Use the same columns in all folders."
            )
    names = found[0].keys() if found else ()
    readers = {name: _reader([keys[name] for keys in found]) for name in names}
    return [{name: readers[name][text] for name, text in keys.items()} for keys in found]


def _reader(texts: Sequence[str | None]) -> Mapping[str | None, Value]:
    """Return the values that the texts of one column stand for."""
    known = [text for text in texts if text is not None]
    values: dict[str | None, Value] = {None: None}
    if all(INTEGER.fullmatch(text) for text in known):
        return values | {text: int(text) for text in known}
    if all(INTEGER.fullmatch(text) or FLOAT.fullmatch(text) for text in known):
        return values | {text: float(text) for text in known}
    return values | {text: text for text in known}
