"""Image files: samples with one file each, from a folder with one sub-folder per class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
from pyarrow import fs

from trainyard_trainer.data.image_codec import EXTENSIONS
from trainyard_trainer.data.sources.samples import (
    ALL,
    SPLIT_NAMES,
    TRAIN,
    ReadImages,
    SampleLocation,
    Source,
    choose_splits,
    is_split_name,
    stamp_of,
)
from trainyard_trainer.errors import ConfigError, RunError

SPLIT_COLUMN = "split"

NO_FILE = "there is no such file"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFiles:
    """Samples that each have one image file."""

    filesystem: fs.FileSystem
    base: str
    """The folder that relative paths start at."""
    paths: Sequence[str]
    labels: pa.Array
    num_bytes: int | None = None
    manifest: str | None = None
    lines: Sequence[int] = ()
    """The line of the manifest of each row."""
    problems: dict[int, str] = field(default_factory=dict)
    pixel_shape: None = None
    is_random_access: bool = True

    def where(self, row: int) -> SampleLocation:
        if self.manifest is None:
            return SampleLocation(self.paths[row])
        return SampleLocation(self.manifest, self.lines[row], "line")

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
        prefix = f"{self.paths[row]}: " if self.manifest else ""
        try:
            with self.filesystem.open_input_stream(path, compression=None) as stream:
                data = stream.read()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return f"{prefix}{NO_FILE}"
        except OSError as error:
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


def open_folder(
    path: str,
    filesystem: fs.FileSystem,
    root: str,
    infos: Sequence[fs.FileInfo],
    say: Callable[[str], None],
) -> Source:
    """Open a folder of images; `infos` are all files and folders in it. Raises ConfigError for an empty
    class."""
    pictures = sorted((info for info in infos if _is_picture(info)), key=lambda info: info.path)
    others = sum(info.type == fs.FileType.File for info in infos) - len(pictures)
    if others:
        say(f"{path}: left out are files whose names are not those of pictures: {others}")
    splits = _find_splits(path, root, _top_folders(root, infos), pictures, say)
    return Source(
        path=path,
        kind="folder of pictures, a sub-folder per class",
        splits={
            name: _files_of_classes(filesystem, root, below, infos, pictures)
            for name, below in splits.items()
        },
        stamp=stamp_of([(info.path, info.size) for info in pictures]),
    )


def _find_splits(
    path: str,
    root: str,
    folders: Sequence[str],
    pictures: Sequence[fs.FileInfo],
    say: Callable[[str], None],
) -> dict[str, str]:
    """Return the path prefix of each split.

    `train` is a split if its images are in sub-folders; if it holds images directly, it is a class.
    """
    parents = [info.path.removeprefix(f"{root}/").split("/")[:-1] for info in pictures]
    classes = {names[0] for names in parents if len(names) == 1}
    named = [name for name in folders if is_split_name(name) and name not in classes]
    others = [name for name in folders if name not in named]
    if not named or (others and not any(name.lower() in SPLIT_NAMES[TRAIN] for name in named)):
        return {ALL: ""}
    if others:
        say(f"{path}: left out beside {', '.join(named)}: {', '.join(others)}")
    chosen = choose_splits(named, path, say)
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
    paths = [info.path.removeprefix(f"{root}/") for info in chosen]
    labels = [path.removeprefix(below).partition("/")[0] for path in paths]
    empty = set(_top_folders(f"{root}/{below}".rstrip("/"), infos)) - set(labels)
    if empty:
        raise ConfigError(
            f"{root}/{below}{min(empty)} has no picture: each sub-folder is a class. "
            f"Pictures are files that end in {', '.join(EXTENSIONS)}. Remove it, or add some."
        )
    return ImageFiles(
        filesystem=filesystem,
        base=root,
        paths=paths,
        labels=pa.array(labels, pa.string()),
        num_bytes=sum(info.size for info in chosen),
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
