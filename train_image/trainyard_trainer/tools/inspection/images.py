"""Inspect a data set, prepared or not: its sizes, its classes and a grid of sample images."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from trainyard_trainer.data.preparation.labels import Numbered, number_labels
from trainyard_trainer.data.preparation.plan import detect_format
from trainyard_trainer.data.preparation.run_data import default_threads
from trainyard_trainer.data.prepared import Prepared, read_dataset_json
from trainyard_trainer.data.sources.columns import ImageColumns
from trainyard_trainer.data.sources.images.find import open_source
from trainyard_trainer.data.sources.images.samples import Samples
from trainyard_trainer.data.sources.listing import explained_errors
from trainyard_trainer.data.sources.parts import ALL, TRAIN
from trainyard_trainer.data.stored_rows import decode
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_files.sizes import size_text
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.terminal import table_text
from trainyard_trainer.tools.inspection.grid import MOST, draw_grid

MOST_PER_CLASS = 10
"""The largest number of images per class in a grid."""

NEAR_ROWS = 4096
"""The number of first rows from which images are chosen if the source has no random access."""

GRID_SIDE = 128
"""The largest width and height of an image in a grid, in pixels."""

SHOWN_CLASSES = 40
"""The largest number of classes in the table of classes."""

SHOWN_BAD = 20
"""The largest number of bad samples that are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The description of a data set."""

    known: dict[str, Any]
    """The description, as `--json` prints it."""
    pick: Callable[[], list[tuple[np.ndarray, str]]]
    """A function that returns a few images of each class, (C, H, W), each with its label."""


def look_at_prepared(folder: RunFolder, prepared: Prepared) -> Facts:
    """Return the description of a prepared data set. Raises ConfigError if it has no images."""
    path, info = prepared.path, prepared.images
    if info.kind == "text":
        raise ConfigError(
            f"{path} contains text, not images: {prepared.num_train:,} training rows and "
            f"{prepared.num_valid:,} validation rows of {info.bytes_per_sample} bytes. Only data "
            "sets of images can be inspected."
        )
    known = read_dataset_json(folder)
    images = known["images"]
    splits = {}
    for name, split in (("train", prepared.train), ("valid", prepared.valid)):
        groups = []
        for file in split.files:
            with explained_errors(file), folder.filesystem.open_input_file(file) as stream:
                groups.append(pq.read_metadata(stream).num_row_groups)
        listed = known["splits"][name]
        splits[name] = {
            "samples": split.count,
            "class_counts": listed["class_counts"],
            "bytes": sum(file["bytes"] for file in listed["files"]),
            "decoded_bytes": split.count * info.bytes_per_sample,
            "files": len(split.files),
            "rows_per_file": max(split.rows),
            "row_groups": sum(groups),
        }
    facts = {
        "path": path,
        "kind": "prepared",
        "source": images["source"],
        "encoding": images["encoding"],
        "shape": images["shape"],
        "classes": images["classes"],
        "mean": images["mean"],
        "std": images["std"],
        "splits": splits,
        "bad_samples": known["bad_samples"],
    }

    def pick() -> list[tuple[np.ndarray, str]]:
        # The rows are shuffled over the files, so that the first file has samples of all classes.
        file = prepared.train.files[0]
        with explained_errors(file), folder.filesystem.open_input_file(file) as stream:
            table = pq.read_table(stream)
        rows = _few_of_each(table["label"].to_numpy())
        columns = decode(table.take(rows), info)
        names = [info.classes[label] for label in columns["label"]]
        return list(zip(columns["image"], names, strict=True))

    return Facts(known=facts, pick=pick)


def look_at_source(
    path: str, *, endpoint: str | None, columns: ImageColumns, say: Callable[[str], None]
) -> Facts:
    """Return the description of images that are not prepared. Raises ConfigError if there are none."""
    source = open_source(path, endpoint=endpoint, columns=columns, say=say)
    first = next((source.splits[name] for name in (TRAIN, ALL) if name in source.splits), None)
    if first is None:
        first = next(iter(source.splits.values()))
    # The first split determines the classes.
    parts = {TRAIN: first} | {
        name: samples for name, samples in source.splits.items() if samples is not first
    }
    classes, numbered = number_labels(parts, source.class_names, None)
    with ThreadPoolExecutor(default_threads(path)) as pool:
        look = detect_format(first, pool)
    shape = [look.channels, *look.size] if look.size else None
    names = {id(samples): name for name, samples in source.splits.items()}
    facts = {
        "path": path,
        "kind": source.kind,
        "encoding": "raw" if look.is_pixels else "encoded",
        "shape": shape,
        "differing_shapes": look.difference or None,
        "classes": list(classes),
        "splits": {
            names[id(samples)]: _count(samples, numbered[part], len(classes), shape)
            for part, samples in parts.items()
        },
        "bad_samples": [
            {"place": str(samples.where(row)), "reason": numbered[part].problems[row]}
            for part, samples in parts.items()
            for row in sorted(numbered[part].problems)
        ],
    }

    def pick() -> list[tuple[np.ndarray, str]]:
        labels = numbered[TRAIN].labels
        rows = numbered[TRAIN].good_rows
        if not first.is_random_access:
            rows = rows[rows < NEAR_ROWS]
        chosen = rows[_few_of_each(labels[rows])]
        with ThreadPoolExecutor(default_threads(path)) as pool:
            found = first.read(chosen, pool)
        return [
            (pixels, classes[labels[row]])
            for place, row in enumerate(chosen.tolist())
            if place not in found.problems
            and (pixels := _to_pixels(found.images[place])) is not None
        ]

    return Facts(known=facts, pick=pick)


def _count(
    samples: Samples, numbered: Numbered, num_classes: int, shape: list[int] | None
) -> dict[str, Any]:
    good = numbered.labels[numbered.good_rows]
    return {
        "samples": len(good),
        "class_counts": np.bincount(good, minlength=num_classes).tolist(),
        "bytes": samples.num_bytes,
        "decoded_bytes": len(good) * int(np.prod(shape)) if shape else None,
    }


def _few_of_each(labels: np.ndarray) -> np.ndarray:
    """Return the indices of the first few samples of each class, as many as fit in a grid."""
    classes = np.unique(labels)[:MOST]
    count = min(MOST_PER_CLASS, MOST // max(len(classes), 1))
    return np.concatenate(
        [np.empty(0, np.int64), *(np.flatnonzero(labels == label)[:count] for label in classes)]
    )


def _to_pixels(image: np.ndarray | bytes) -> np.ndarray | None:
    """Return the pixels of an image, scaled down for the grid, or None if it cannot be decoded."""
    if isinstance(image, np.ndarray):
        return image
    from trainyard_trainer.data import image_codec

    try:
        header = image_codec.read_header(image)
        side = min(GRID_SIDE, max(header.height, header.width))
        return image_codec.load(image, (header.channels, side, side), header)
    except image_codec.UnreadableError:
        return None


def write_grid(facts: Facts, path: str) -> None:
    """Write a PNG file with sample images of each class. Raises ConfigError if it cannot be written."""
    picked = facts.pick()
    if not picked:
        raise ConfigError(f"{facts.known['path']} has no image that can be decoded.")
    try:
        Path(path).write_bytes(draw_grid(picked))
    except OSError as error:
        raise ConfigError(f"--grid {path} cannot be written: {error.strerror}.") from error


def describe(known: dict[str, Any]) -> str:
    """Return the description of a data set as text, with tables of its splits and classes."""
    sizes = " x ".join(map(str, known["shape"])) if known["shape"] else "several"
    lines = [
        f"{known['path']}: {known['kind']}",
        f"images: {known['encoding']}, shape {sizes} (channels x rows x columns)",
    ]
    if known.get("differing_shapes"):
        lines.append(f"        {known['differing_shapes']}")
    for key in ("mean", "std"):
        if key in known:
            lines.append(f"{key}: {', '.join(f'{value:.4f}' for value in known[key])}")
    lines += ["", _split_table(known["splits"]), "", _class_table(known)]
    bad = known["bad_samples"]
    if bad:
        lines += ["", f"bad samples: {len(bad)}"]
        lines += [f"  {each['place']}: {each['reason']}" for each in bad[:SHOWN_BAD]]
        if len(bad) > SHOWN_BAD:
            lines.append(f"  and {len(bad) - SHOWN_BAD} more")
    return "\n".join(lines)


def _split_table(splits: dict[str, dict[str, Any]]) -> str:
    columns = {
        "samples": "{:,}",
        "bytes": None,
        "decoded_bytes": None,
        "files": "{:,}",
        "rows_per_file": "{:,}",
        "row_groups": "{:,}",
    }
    found = [column for column in columns if any(column in split for split in splits.values())]
    rows = []
    for name, split in splits.items():
        row = [name]
        for column in found:
            value, form = split[column], columns[column]
            text = "-" if value is None else form.format(value) if form else size_text(value)
            row.append(text)
        rows.append(row)
    return table_text(["split", *(column.replace("_", " ") for column in found)], rows)


def _class_table(known: dict[str, Any]) -> str:
    classes, splits = known["classes"], known["splits"]
    rows = [
        [name, *(f"{split['class_counts'][label]:,}" for split in splits.values())]
        for label, name in enumerate(classes[:SHOWN_CLASSES])
    ]
    text = table_text([f"{len(classes)} classes", *splits], rows)
    more = len(classes) - SHOWN_CLASSES
    return text if more <= 0 else f"{text}\nand {more} more classes"
