"""Image files: samples with one file each, from a folder with one sub-folder per class."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
from pyarrow import fs

from trainyard_trainer.data.image_codec import EXTENSIONS
from trainyard_trainer.data.sources.column_types import MISSING
from trainyard_trainer.data.sources.columns import check_columns
from trainyard_trainer.data.sources.images.samples import ImageSource, ReadImages, Source
from trainyard_trainer.data.sources.listing import broken_link_target
from trainyard_trainer.data.sources.partitions import Value, columns_in_folders
from trainyard_trainer.data.sources.parts import (
    ALL,
    SPLIT_COLUMN,
    SPLIT_NAMES,
    TRAIN,
    VALID,
    SampleLocation,
    choose_splits,
    is_split_name,
    stamp_of,
)
from trainyard_trainer.errors import ConfigError, RunError

NO_FILE = "there is no such file"

LABEL_COLUMN = "Set data.label_column (--label-column of `trainyard data`)."

MANIFEST = "If it is a class, list the pictures in a manifest (a CSV file with the columns image and label)."

SHOWN = 5
"""The largest number of folders that an error message lists."""

SHOWN_PATH = 80
"""The number of characters of a path that is too long which an error message shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFiles:
    """Samples that each have one image file."""

    filesystem: fs.FileSystem
    base: str
    """The folder that relative paths start at."""
    paths: Sequence[str]
    labels: pa.Array
    num_bytes: int | None = None
    manifests: Sequence[str] = ()
    """The manifest of each row; empty where there is none."""
    lines: Sequence[int] = ()
    """The line of each row in its manifest."""
    problems: dict[int, str] = field(default_factory=dict)
    pixel_shape: None = None
    is_random_access: bool = True

    def where(self, row: int) -> SampleLocation:
        if not self.manifests:
            return SampleLocation(self.paths[row])
        return SampleLocation(self.manifests[row], self.lines[row], "line")

    def read(self, rows: np.ndarray, pool: Executor) -> ReadImages:
        images: list[bytes] = []
        problems: dict[int, str] = {}
        for place, found in enumerate(pool.map(self._read, rows.tolist())):
            if isinstance(found, str):
                problems[place] = found
            images.append(b"" if isinstance(found, str) else found)
        return ReadImages(images, problems)

    def _read(self, row: int) -> bytes | str:
        """Return an image file, or the reason why there is none. Raises RunError if the storage fails."""
        path = self._full_path(self.paths[row])
        prefix = f"{self.paths[row]}: " if self.manifests else ""
        try:
            with self.filesystem.open_input_stream(path, compression=None) as stream:
                data = stream.read()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            target = broken_link_target(self.filesystem, path)
            return (
                f"{prefix}{NO_FILE}"
                if target is None
                else f"{prefix}it is a link to {target}, {NO_FILE}"
            )
        except PermissionError:
            return f"{prefix}this user may not read it"
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return f"{prefix[:SHOWN_PATH]}the path is longer than the file system allows"
            if not self._is_file(path):
                return f"{prefix}{NO_FILE}"
            raise RunError(f"{path} cannot be read: {error}") from error
        return data or f"{prefix}it is empty"

    def _full_path(self, path: str) -> str:
        if isinstance(self.filesystem, fs.LocalFileSystem):
            return str(PurePosixPath(self.base, path))
        return path.removeprefix("s3://") if path.startswith("s3://") else f"{self.base}/{path}"

    def _is_file(self, path: str) -> bool:
        return self.filesystem.get_file_info(path).type == fs.FileType.File


# A folder with a sub-folder per class.


def open_folder(source: ImageSource, infos: Sequence[fs.FileInfo]) -> Source:
    """Open a folder of images; `infos` are all files and folders in it.

    Raises ConfigError for an empty class, for pictures that have no class, and where it is not clear whether
    a folder is a class or a split.
    """
    pictures = sorted((info for info in infos if _is_picture(info)), key=lambda info: info.path)
    others = sum(info.type == fs.FileType.File for info in infos) - len(pictures)
    if others:
        source.say(
            f"{source.path}: left out are files whose names are not those of pictures: {others}"
        )
    in_folders = columns_in_folders(source.root, [info.path for info in pictures])
    if in_folders[0]:
        splits = _splits_of_columns(source, pictures, in_folders)
    else:
        prefixes = _find_splits(source, _top_folders(source.root, infos), pictures)
        splits = {
            name: _files_of_classes(source.filesystem, source.root, below, infos, pictures)
            for name, below in prefixes.items()
        }
    return Source(
        path=source.path,
        kind="folder of pictures, a sub-folder per class",
        splits=splits,
        stamp=stamp_of([(info.path, info.size, info.mtime_ns) for info in pictures]),
    )


def _splits_of_columns(
    source: ImageSource,
    pictures: Sequence[fs.FileInfo],
    in_folders: Sequence[Mapping[str, Value]],
) -> dict[str, ImageFiles]:
    """Return the samples of each split where folders are named `label=cat`, and optionally `split=train`."""
    path, root, label_column = source.path, source.root, source.columns.label
    check_columns(
        f"{path}, by the names of its folders,", in_folders[0], label_column, remedy=LABEL_COLUMN
    )
    rows: dict[str, list[int]] = {}
    for row, columns in enumerate(in_folders):
        name = columns.get(SPLIT_COLUMN, pictures[row].path.removeprefix(f"{root}/").split("/")[0])
        rows.setdefault(str(name) if is_split_name(str(name)) else "", []).append(row)
    if set(rows) == {""}:
        chosen = {ALL: ""}
    elif "" in rows:
        raise ConfigError(
            f"{path} has pictures of the split {', '.join(sorted(rows.keys() - {''}))}, and pictures of no "
            f"split, such as {pictures[rows[''][0]].path}. Move these into a folder of a split."
        )
    else:
        chosen = choose_splits(rows, path, source.say)
    return {
        split: _files_with_labels(
            source.filesystem,
            root,
            [pictures[row] for row in rows[name]],
            [in_folders[row][label_column] for row in rows[name]],
        )
        for split, name in chosen.items()
    }


def _find_splits(
    source: ImageSource, folders: Sequence[str], pictures: Sequence[fs.FileInfo]
) -> dict[str, str]:
    """Return the path prefix of each split.

    `train` is a split if its images are in sub-folders; if it holds images directly, it is a class. Raises
    ConfigError where it could be either, and for pictures in no folder.
    """
    path, root = source.path, source.root
    parents = [info.path.removeprefix(f"{root}/").split("/")[:-1] for info in pictures]
    if [] in parents:
        raise ConfigError(
            f"{pictures[parents.index([])].path} lies beside the folders of the classes, so it has no class. "
            "Move it into one of them, or remove it."
        )
    direct = {names[0] for names in parents if len(names) == 1}
    nested = {names[0] for names in parents if len(names) > 1}
    for name in sorted(direct & nested):
        if is_split_name(name):
            raise ConfigError(
                f"{root}/{name} has pictures of its own, such as {pictures[parents.index([name])].path}, and "
                "folders of pictures. If it is a split, move its pictures into the folders of their classes. "
                f"{MANIFEST}"
            )
    if all(is_split_name(name) for name in direct | nested) and direct:
        raise ConfigError(
            f"{path} has pictures in {', '.join(sorted(direct))}, which are names of splits, and no folder "
            f"per class in them. Move the pictures into folders such as {min(direct)}/cat. {MANIFEST}"
        )
    named = [name for name in folders if is_split_name(name) and name not in direct]
    others = [name for name in folders if name not in named]
    if not named:
        return {ALL: ""}
    # A folder with pictures beside a lone split may be a class, like the split itself.
    is_divided = {TRAIN, VALID} == {
        split for name in named for split in SPLIT_NAMES if name.lower() in SPLIT_NAMES[split]
    }
    unclear = sorted((direct | nested) & set(others))
    if unclear and not is_divided:
        raise ConfigError(
            f"{path}: {', '.join(named)} has sub-folders with pictures, like a split, and beside it there "
            "are "
            f"{', '.join(unclear[:SHOWN])} with pictures too, which are no splits. Name the folder of the "
            f"split as the source ({path}/{named[0]}), or move the others away. {MANIFEST}"
        )
    if others:
        source.say(f"{source.path}: left out beside {', '.join(named)}: {', '.join(others)}")
    chosen = choose_splits(named, path, source.say)
    return {split: f"{folder}/" for split, folder in chosen.items()}


def _files_of_classes(
    filesystem: fs.FileSystem,
    root: str,
    below: str,
    infos: Sequence[fs.FileInfo],
    pictures: Sequence[fs.FileInfo],
) -> ImageFiles:
    """Return the samples of a split; `below` is its sub-folder, such as `train/`."""
    chosen = [info for info in pictures if info.path.startswith(f"{root}/{below}")]
    labels = [info.path.removeprefix(f"{root}/{below}").partition("/")[0] for info in chosen]
    empty = set(_top_folders(f"{root}/{below}".rstrip("/"), infos)) - set(labels)
    if empty:
        raise ConfigError(
            f"{root}/{below}{min(empty)} has no picture: each sub-folder is a class. "
            f"Pictures are files that end in {', '.join(EXTENSIONS)}. Remove it, or add some."
        )
    return _files_with_labels(filesystem, root, chosen, labels)


def _files_with_labels(
    filesystem: fs.FileSystem,
    root: str,
    pictures: Sequence[fs.FileInfo],
    labels: Sequence[Value],
) -> ImageFiles:
    """Return these pictures with their labels, which are numbers if all are."""
    kind = pa.int64() if all(isinstance(label, int | None) for label in labels) else pa.string()
    problems = {
        row: f"its folder is called {label}, which stands for a missing label"
        for row, label in enumerate(labels)
        if label in MISSING
    }
    texts = [label if label is None or kind == pa.int64() else str(label) for label in labels]
    return ImageFiles(
        filesystem=filesystem,
        base=root,
        paths=[info.path.removeprefix(f"{root}/") for info in pictures],
        labels=pa.array([None if text in MISSING else text for text in texts], kind),
        num_bytes=sum(info.size or 0 for info in pictures),
        problems=problems,
    )


def _is_picture(info: fs.FileInfo) -> bool:
    return info.type == fs.FileType.File and info.path.lower().endswith(EXTENSIONS)


def _top_folders(root: str, infos: Iterable[fs.FileInfo]) -> list[str]:
    """Return the folders directly in the root. In an object store they show only in the names of files."""
    names = set()
    for info in infos:
        if not info.path.startswith(f"{root}/"):
            continue
        first, slash, _ = info.path.removeprefix(f"{root}/").partition("/")
        if slash or info.type == fs.FileType.Directory:
            names.add(first)
    return sorted(names)


def has_classes(root: str, infos: Sequence[fs.FileInfo]) -> bool:
    """Whether there are images in sub-folders."""
    depth = root.count("/") + 1
    return any(_is_picture(info) and info.path.count("/") > depth for info in infos)
