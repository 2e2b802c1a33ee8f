"""Find out what kind of data set of images lies at a path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
from pyarrow import fs

from trainyard_trainer.config.data.sources import (
    BUILT_IN,
    MANIFEST_SUFFIXES,
    describe_preparable_sources,
)
from trainyard_trainer.data.prepared import DATASET
from trainyard_trainer.data.sources.images.idx import is_idx_images, open_idx
from trainyard_trainer.data.sources.images.image_files import has_classes, open_folder
from trainyard_trainer.data.sources.images.lance_images import open_lance
from trainyard_trainer.data.sources.images.manifest import manifest_files, open_manifest
from trainyard_trainer.data.sources.images.samples import HeldSamples, Source
from trainyard_trainer.data.sources.images.tables import open_tables
from trainyard_trainer.data.sources.lance_datasets import (
    is_dataset,
    lance_folders,
    split_version,
)
from trainyard_trainer.data.sources.listing import explained_errors, list_all, require_utf8
from trainyard_trainer.data.sources.parquet_files import is_parquet, parquet_files
from trainyard_trainer.data.sources.parts import ALL, stamp_of
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem

UNDERSTOOD = (
    f"A data set of images is {describe_preparable_sources()} "
    "Text is prepared by the runs that train on it (train.recipe: language_model). "
    "Tar shards of WebDataset are read without preparation (data.stream: true)."
)

DIGITS = "digits"

SHOWN_KINDS = 5

KEYS = ("data.source", "data.endpoint")
"""The keys of a run file that name a source."""


def open_source(
    path: str,
    *,
    endpoint: str | None,
    image_column: str,
    label_column: str,
    say: Callable[[str], None],
) -> Source:
    """Find out what kind of data set of images lies at a path, and open it.

    Raises ConfigError if there is nothing, or nothing that is understood, and RunError if the storage of the
    source fails.
    """
    if path == DIGITS:
        return _open_digits()
    if path in BUILT_IN:
        raise ConfigError(f"{path} is no data set of images.\n       {UNDERSTOOD}")
    require_utf8(path)
    address, version = split_version(path)
    filesystem, root = open_filesystem(address, endpoint, names=KEYS)
    info = find_root(address, filesystem, root, endpoint)
    with explained_errors(path):
        if info.type == fs.FileType.File:
            return _open_file(path, filesystem, info, image_column, label_column, say)
        is_lance = version is not None or is_dataset(filesystem, root)
        infos = [] if is_lance else list_all(filesystem, root, say)
        datasets = [root] if is_lance else lance_folders(root, infos)
        if datasets:
            return open_lance(
                path,
                filesystem,
                datasets,
                root=root,
                version=version,
                endpoint=endpoint,
                image_column=image_column,
                label_column=label_column,
                say=say,
            )
        return _open_folder(path, filesystem, root, infos, image_column, label_column, say)


def find_root(path: str, filesystem: fs.FileSystem, root: str, endpoint: str | None) -> fs.FileInfo:
    """Return the file or folder at the path of a source. Raises ConfigError if there is nothing."""
    require_utf8(path)
    with explained_errors(path):
        info = filesystem.get_file_info(root)
    if info.type == fs.FileType.NotFound:
        raise ConfigError(f"there is no {path}" + (f" at {endpoint}." if endpoint else "."))
    return info


def _open_folder(
    path: str,
    filesystem: fs.FileSystem,
    root: str,
    infos: Sequence[fs.FileInfo],
    image_column: str,
    label_column: str,
    say: Callable[[str], None],
) -> Source:
    names = {info.path: info.base_name for info in infos if info.type == fs.FileType.File}
    if f"{root}/{DATASET}" in names:
        raise ConfigError(
            f"{path} is prepared already: train on it as it is (data.source: {path})."
        )
    images = [file for file, name in names.items() if is_idx_images(name)]
    if images:
        return open_idx(path, filesystem, images, say)
    tables = parquet_files(filesystem, root, infos)
    if tables:
        return open_tables(path, filesystem, root, tables, image_column, label_column, say)
    if root.lower().endswith(MANIFEST_SUFFIXES):
        manifests = manifest_files(root, infos)
        if manifests:
            return open_manifest(path, filesystem, root, manifests, image_column, label_column, say)
    if has_classes(root, infos):
        return open_folder(path, filesystem, root, infos, label_column, say)
    raise ConfigError(f"{path} has {_describe(infos)}, and is no data set.\n       {UNDERSTOOD}")


def open_prepared(path: str, endpoint: str | None) -> RunFolder | None:
    """Return the folder of a prepared data set, or None if the path holds something else."""
    if path in BUILT_IN:
        return None
    require_utf8(path)
    folder = RunFolder(*open_filesystem(path, endpoint, names=KEYS))
    with explained_errors(path):
        info = folder.filesystem.get_file_info(f"{folder.root}/{DATASET}")
    return None if info.type == fs.FileType.NotFound else folder


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
        return open_manifest(path, filesystem, info.path, [info], image_column, label_column, say)
    if is_parquet(name):
        folder = info.path.rpartition("/")[0]
        return open_tables(path, filesystem, folder, [info], image_column, label_column, say)
    raise ConfigError(f"{path} is no file of a known kind.\n       {UNDERSTOOD}")


def _describe(infos: Sequence[fs.FileInfo]) -> str:
    """Return what a folder holds, such as `folders: 2, files: 14 (.txt 12, .json 2)`."""
    files = [info for info in infos if info.type == fs.FileType.File]
    kinds = Counter(PurePosixPath(info.path).suffix or "without an ending" for info in files)
    shown = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common(SHOWN_KINDS))
    folders = len(infos) - len(files)
    return f"folders: {folders}, files: {len(files)}" + (f" ({shown})" if shown else "")


def _open_digits() -> Source:
    """Return the 1,797 handwritten digits of 8x8 pixels that come with scikit-learn."""
    # Other sources do not need scikit-learn, whose import takes a second.
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
