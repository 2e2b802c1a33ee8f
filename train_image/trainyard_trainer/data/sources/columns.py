"""The check that a source has the columns that the config names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple

from trainyard_trainer.errors import ConfigError

IMAGE_COLUMNS = (
    "Set data.image_column and data.label_column (--image-column and --label-column of "
    "`trainyard data`)."
)


class ImageColumns(NamedTuple):
    """The names of the columns of images, or of their paths, and of labels."""

    image: str
    label: str


def check_columns(
    file: str, found: Iterable[str], *needed: str, remedy: str = IMAGE_COLUMNS
) -> None:
    """Raise ConfigError if a needed column is missing or is there twice; name the nearest one."""
    names = list(found)
    for column in needed:
        if names.count(column) == 1:
            continue
        if column in names:
            raise ConfigError(
                f"{file} has the column {column} {_times(names.count(column))}: which one is meant cannot be "
                "known. Rename or remove the others."
            )
        near = difflib.get_close_matches(column, names, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"{file} has no column {column}: it has {', '.join(names)}.{hint} {remedy}"
        )


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"
