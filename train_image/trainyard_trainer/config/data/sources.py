"""The registry of data sources: every kind of data that `data.source` of a run file can name.

Validation of run files, descriptions in the JSON Schema, help texts, error messages and the table of the
documentation are derived from it. To add a kind, add an entry here and its reader in
`trainyard_trainer.data.sources` (images and text) or `trainyard_trainer.boosting.table` (tables).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

IMAGES = "image_classification"
TEXT = "language_model"
CHATS = "causal_lm"
TABLES = "gradient_boosting"

MANIFEST_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
"""Endings of the file names of manifests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """A kind of data that runs can train on."""

    name: str
    """Name of the kind. For a built-in data set it is the value of `data.source` too."""

    description: str
    """What the data looks like: a noun phrase in Markdown, which begins in lower case or with a number."""

    example: str
    """A value of `data.source` that names such data."""

    recipes: tuple[str, ...]
    """Recipes that can train on it."""

    is_built_in: bool = False
    """Whether the data comes with an installed package and is named by `name` instead of by a path."""

    is_prepared: bool = False
    """Whether `trainyard data prepare` wrote it, so that it is not an input of that command."""

    num_classes: int | None = None
    """Number of classes of a built-in data set of images, for `trainyard init`."""

    num_channels: int | None = None
    """Number of channels of the images of a built-in data set, for `trainyard init`."""


DATA_SOURCES: tuple[DataSource, ...] = (
    DataSource(
        name="digits",
        description="1,797 handwritten digits of 8x8 pixels, which come with scikit-learn",
        example="digits",
        recipes=(IMAGES,),
        is_built_in=True,
        num_classes=10,
        num_channels=1,
    ),
    DataSource(
        name="stdlib",
        description="one mebibyte of the Python standard library's modules, as text",
        example="stdlib",
        recipes=(TEXT,),
        is_built_in=True,
    ),
    DataSource(
        name="breast_cancer",
        description="569 rows of 30 columns, which come with scikit-learn; the label column is `diagnosis`",
        example="breast_cancer",
        recipes=(TABLES,),
        is_built_in=True,
    ),
    DataSource(
        name="prepared",
        description="a folder with `dataset.json` that `trainyard data prepare` wrote",
        example="/mnt/data/photos-prepared",
        recipes=(IMAGES,),
        is_prepared=True,
    ),
    DataSource(
        name="idx",
        description="idx files in the layout of MNIST, compressed or not, such as "
        "`train-images-idx3-ubyte.gz` beside `train-labels-idx1-ubyte.gz`",
        example="/mnt/data/mnist",
        recipes=(IMAGES,),
    ),
    DataSource(
        name="image folder",
        description="a folder of images with one sub-folder per class, optionally below `train/` and "
        "`valid/`",
        example="/mnt/data/photos",
        recipes=(IMAGES,),
    ),
    DataSource(
        name="manifest",
        description="a CSV, TSV or JSONL file "
        f"({', '.join(f'`{suffix}`' for suffix in MANIFEST_SUFFIXES)}) "
        "with the paths and labels of images, optionally with a column `split`",
        example="/mnt/data/photos.csv",
        recipes=(IMAGES,),
    ),
    DataSource(
        name="Parquet images",
        description="Parquet files with encoded images, raw bytes, lists or fixed-shape tensors of pixels",
        example="s3://bucket/photos",
        recipes=(IMAGES,),
    ),
    DataSource(
        name="Lance images",
        description="data sets of [Lance](https://lance.org) (folders `*.lance`), with such columns or with "
        "blobs; `@3` or `@TAG` behind the name is a version",
        example="s3://bucket/photos.lance@3",
        recipes=(IMAGES,),
    ),
    DataSource(
        name="text",
        description="a text file or a folder of text files",
        example="/mnt/data/books",
        recipes=(TEXT,),
    ),
    DataSource(
        name="token files",
        description="files of tokens (`.bin`) named `train` and `val`, as nanoGPT and llm.c write them",
        example="/mnt/data/fineweb10B",
        recipes=(TEXT,),
    ),
    DataSource(
        name="chats",
        description="JSON lines, a JSON list, Parquet files, data sets of Lance or a folder of `datasets` "
        "whose rows are chats "
        "(`messages`, or `conversations` of ShareGPT), prompts with completions, instructions of Alpaca, or "
        "`text`",
        example="/mnt/data/chats.jsonl",
        recipes=(CHATS,),
    ),
    DataSource(
        name="Parquet table",
        description="a Parquet file, or a folder of Parquet files, with a column per feature and one for "
        "the label",
        example="/mnt/data/houses.parquet",
        recipes=(TABLES,),
    ),
)

BUILT_IN: Mapping[str, DataSource] = {
    source.name: source for source in DATA_SOURCES if source.is_built_in
}
"""The data sets that come with a package, by the value of `data.source` that names them."""


def absolute(source: str) -> str:
    """Return the source with an absolute path, so that it does not depend on the working directory."""
    if source in BUILT_IN:
        return source
    return source.rstrip("/") if "://" in source else str(Path(source).resolve())


def sources_for(*recipes: str) -> list[DataSource]:
    """Return the kinds of data that at least one of the recipes can train on, in the registry's order."""
    return [source for source in DATA_SOURCES if set(source.recipes) & set(recipes)]


def describe_sources(*recipes: str) -> str:
    """Describe in one sentence the values that `data.source` can have for the recipes."""
    sources = sources_for(*recipes)
    built_in = [
        f"`{source.name}` ({source.description})" for source in sources if source.is_built_in
    ]
    at_a_path = [source.description for source in sources if not source.is_built_in]
    return f"{', '.join(built_in)}; or the path or `s3://` URL of: {'; '.join(at_a_path)}."


def preparable_sources() -> list[DataSource]:
    """Return the kinds of data that `trainyard data prepare` and `trainyard data inspect` read: images."""
    return [source for source in sources_for(IMAGES) if not source.is_prepared]


def describe_preparable_sources() -> str:
    """Describe the SOURCE argument of `trainyard data prepare` in one sentence, for help and error texts."""
    sources = preparable_sources()
    built_in = ", ".join(f"`{source.name}`" for source in sources if source.is_built_in)
    at_a_path = "; ".join(source.description for source in sources if not source.is_built_in)
    return f"{built_in}, or the path or s3:// URL of: {at_a_path}."


def sources_table(*recipes: str) -> str:
    """Return a table in Markdown of the kinds of data for the recipes: name, description and an example."""
    rows = [
        f"| {source.name} | {source.description} | `{source.example}` |"
        for source in sources_for(*recipes)
    ]
    return "\n".join(["| kind | what it is | `data.source` |", "|---|---|---|", *rows])
