"""What kind of data set lies at a path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
from pyarrow import fs

from trainyard_trainer.config.data_sources import (
    BUILT_IN,
    MANIFEST_SUFFIXES,
    describe_preparable_sources,
)
from trainyard_trainer.data.prepared import DATASET
from trainyard_trainer.data.sources.idx import is_idx_images, open_idx
from trainyard_trainer.data.sources.image_files import has_classes, open_folder
from trainyard_trainer.data.sources.manifest import open_manifest
from trainyard_trainer.data.sources.samples import ALL, HeldSamples, Source, stamp_of
from trainyard_trainer.data.sources.tables import open_tables
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem

UNDERSTOOD = (
    f"A data set of images is {describe_preparable_sources()} "
    "Text is prepared by the runs that train on it (train.recipe: language_model)."
)

DIGITS = "digits"

SHOWN_KINDS = 5

KEYS = ("data.source", "data.endpoint")
"""Of a run file."""

HIDDEN = (".", "__MACOSX")
"""How names begin of what a program keeps for itself."""


def open_source(
    path: str,
    *,
    endpoint: str | None,
    image_column: str,
    label_column: str,
    say: Callable[[str], None],
) -> Source:
    """Raises ConfigError if there is nothing, or nothing that is understood."""
    if path == DIGITS:
        return _open_digits()
    if path in BUILT_IN:
        raise ConfigError(f"{path} is no data set of images.\n       {UNDERSTOOD}")
    filesystem, root = open_filesystem(path, endpoint, names=KEYS)
    info = filesystem.get_file_info(root)
    if info.type == fs.FileType.NotFound:
        raise ConfigError(f"there is no {path}" + (f" at {endpoint}." if endpoint else "."))
    if info.type == fs.FileType.File:
        return _open_file(path, filesystem, info, image_column, label_column, say)
    infos = list_all(filesystem, root)
    names = {info.path: info.base_name for info in infos if info.type == fs.FileType.File}
    if f"{root}/{DATASET}" in names:
        raise ConfigError(
            f"{path} is prepared already: train on it as it is (data.source: {path})."
        )
    images = [file for file, name in names.items() if is_idx_images(name)]
    if images:
        return open_idx(path, filesystem, images, say)
    tables = [info for info in infos if info.base_name.endswith(".parquet")]
    if tables:
        return open_tables(path, filesystem, root, tables, image_column, label_column, say)
    if has_classes(root, infos):
        return open_folder(path, filesystem, root, infos, say)
    raise ConfigError(f"{path} has {_describe(infos)}, and is no data set.\n       {UNDERSTOOD}")


def open_prepared(path: str, endpoint: str | None) -> RunFolder | None:
    """The folder of a data set that is prepared, or None if that is something else."""
    if path in BUILT_IN:
        return None
    folder = RunFolder(*open_filesystem(path, endpoint, names=KEYS))
    return folder if folder.exists(f"{folder.root}/{DATASET}") else None


def _open_file(
    path: str,
    filesystem: fs.FileSystem,
    info: fs.FileInfo,
    image_column: str,
    label_column: str,
    say: Callable[[str], None],
) -> Source:
    name = info.base_name.lower()
    if is_idx_images(name):
        return open_idx(path, filesystem, [info.path], say)
    if name.endswith(MANIFEST_SUFFIXES):
        return open_manifest(path, filesystem, info.path, image_column, label_column, say)
    if name.endswith(".parquet"):
        folder = info.path.rpartition("/")[0]
        return open_tables(path, filesystem, folder, [info], image_column, label_column, say)
    raise ConfigError(f"{path} is no file of a known kind.\n       {UNDERSTOOD}")


def list_all(filesystem: fs.FileSystem, root: str) -> list[fs.FileInfo]:
    """All files and folders below the root, in the order of their names, but none that is hidden."""
    infos = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    return sorted(
        (
            info
            for info in infos
            if not any(
                part.startswith(HIDDEN) for part in info.path.removeprefix(f"{root}/").split("/")
            )
        ),
        key=lambda info: info.path,
    )


def _describe(infos: Sequence[fs.FileInfo]) -> str:
    """`folders: 2, files: 14 (.txt 12, .json 2)`."""
    files = [info for info in infos if info.type == fs.FileType.File]
    kinds = Counter(PurePosixPath(info.path).suffix or "without an ending" for info in files)
    shown = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common(SHOWN_KINDS))
    folders = len(infos) - len(files)
    return f"folders: {folders}, files: {len(files)}" + (f" ({shown})" if shown else "")


def _open_digits() -> Source:
    """1,797 handwritten digits of 8x8."""
    # Only whoever prepares them needs scikit-learn.
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)  # they come as 0 to 16
    samples = HeldSamples(
        images=pixels[:, None],
        labels=pa.array(digits.target.astype(np.int64)),
        file=DIGITS,
    )
    return Source(
        path=DIGITS,
        kind="built in",
        splits={ALL: samples},
        class_names=tuple(map(str, digits.target_names)),
        stamp=stamp_of(len(pixels)),
    )
