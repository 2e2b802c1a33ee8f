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
from trainyard_trainer.data.sources.columns import ImageColumns
from trainyard_trainer.data.sources.images.idx import is_idx_images, open_idx
from trainyard_trainer.data.sources.images.image_files import has_classes, open_folder
from trainyard_trainer.data.sources.images.lance_images import open_lance
from trainyard_trainer.data.sources.images.manifest import manifest_files, open_manifest
from trainyard_trainer.data.sources.images.samples import HeldSamples, ImageSource, Source
from trainyard_trainer.data.sources.images.tables import open_tables
from trainyard_trainer.data.sources.lance_datasets import (
    is_dataset,
    lance_folders,
    split_version,
)
from trainyard_trainer.data.sources.listing import (
    SOURCE_KEYS,
    explained_errors,
    find_root,
    list_all,
    require_utf8,
)
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


def open_source(
    path: str,
    *,
    endpoint: str | None,
    columns: ImageColumns,
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
    filesystem, root = open_filesystem(address, endpoint, names=SOURCE_KEYS)
    info = find_root(address, filesystem, root, endpoint)
    source = ImageSource(path, filesystem, root, columns, say)
    with explained_errors(path):
        if info.type == fs.FileType.File:
            return _open_file(source, info)
        is_lance = version is not None or is_dataset(filesystem, root)
        infos = [] if is_lance else list_all(filesystem, root, say)
        datasets = [root] if is_lance else lance_folders(root, infos)
        if datasets:
            return open_lance(source, datasets, version=version, endpoint=endpoint)
        return _open_folder(source, infos)


def _open_folder(source: ImageSource, infos: Sequence[fs.FileInfo]) -> Source:
    path, root = source.path, source.root
    names = {info.path: info.base_name for info in infos if info.type == fs.FileType.File}
    if f"{root}/{DATASET}" in names:
        raise ConfigError(
            f"{path} is prepared already: train on it as it is (data.source: {path})."
        )
    images = [file for file, name in names.items() if is_idx_images(name)]
    if images:
        return open_idx(source, images)
    tables = parquet_files(source.filesystem, root, infos)
    if tables:
        return open_tables(source, tables)
    if root.lower().endswith(MANIFEST_SUFFIXES):
        manifests = manifest_files(root, infos)
        if manifests:
            return open_manifest(source, manifests)
    if has_classes(root, infos):
        return open_folder(source, infos)
    raise ConfigError(f"{path} has {_describe(infos)}, and is no data set.\n       {UNDERSTOOD}")


def open_prepared(path: str, endpoint: str | None) -> RunFolder | None:
    """Return the folder of a prepared data set, or None if the path holds something else."""
    if path in BUILT_IN:
        return None
    require_utf8(path)
    folder = RunFolder(*open_filesystem(path, endpoint, names=SOURCE_KEYS))
    with explained_errors(path):
        info = folder.filesystem.get_file_info(f"{folder.root}/{DATASET}")
    return None if info.type == fs.FileType.NotFound else folder


def _open_file(source: ImageSource, info: fs.FileInfo) -> Source:
    name = info.base_name.lower()
    if is_idx_images(name):
        return open_idx(source, [info.path])
    if name.endswith(MANIFEST_SUFFIXES):
        return open_manifest(source, [info])
    if is_parquet(name):
        folder = info.path.rpartition("/")[0]
        return open_tables(source._replace(root=folder), [info])
    raise ConfigError(f"{source.path} is no file of a known kind.\n       {UNDERSTOOD}")


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
