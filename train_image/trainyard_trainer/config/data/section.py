"""The section `data`: the data set of a run, and how batches are made of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from trainyard_trainer.config.data.sources import (
    BUILT_IN,
    CHATS,
    IMAGES,
    TABLES,
    TEXT,
    describe_sources,
    sources_for,
)
from trainyard_trainer.config.data.streaming import require_streamed
from trainyard_trainer.config.location import location_problem
from trainyard_trainer.config.section import Endpoint, PositiveNumber, Section

STREAM_GROUPS = 16
"""The default number of groups of rows of a stream that are shuffled together."""


MEMORY_GIB = 1.0
"""The default of the memory that a process holds of a table, in GiB."""


def _require_source(source: str) -> str:
    """Return the source if it is a built-in data set or a path.

    A path needs a slash, so that a misspelled name of a built-in data set is not taken for one.
    """
    if (problem := location_problem(source)) is not None:
        raise PydanticCustomError("source", "{problem}", {"problem": problem})
    if source in BUILT_IN or "/" in source:
        return source
    raise PydanticCustomError(
        "source",
        f"must be {', '.join(BUILT_IN)}, a path with a slash in it such as ./{source}, "
        "or s3://bucket/prefix",
    )


class Augment(Section):
    """Random changes of training images, made on the device and different in each epoch."""

    flip: bool = False
    """Mirror each image from left to right with probability one half."""

    crop: NonNegativeInt = 0
    """Shift each image by up to this many pixels vertically and horizontally; the border is filled with
    black."""


class Loading(Section):
    """How batches are made of a data set, whatever it holds."""

    loader: Literal["torch", "ray"] = "torch"
    """The loader that makes the batches: a PyTorch DataLoader in each worker (`torch`), or tasks of Ray
    anywhere in the cluster (`ray`)."""

    ray_nodes: dict[str, str] | None = None
    """Labels of the Ray nodes on which the Ray loader reads and decodes, such as `{ray-subcluster: data}`.
    Without them it may use any node."""

    decode_workers: NonNegativeInt | None = None
    """The number of processes per worker in which the torch loader reads and decodes samples. The default is
    one less than the worker's CPUs, and 0 for data that need no decoding."""

    shuffle: bool = True
    """Shuffle the samples in each epoch; the order follows from the seed and the epoch."""

    drop_last: bool = True
    """Leave out the samples of each epoch that do not fill a global batch. Otherwise the last batch is
    smaller."""

    memory_gib: PositiveNumber | None = None
    """The memory in GiB for data that are held. Of a table, each process that reads samples holds so much, by
    default 1: files that are read as a whole and have more are refused. The Ray loader holds decoded samples
    of prepared data in the object store of each machine, by default up to a quarter of it, and streams
    larger data."""

    stream: bool = False
    """Read the source while the run trains, group of rows by group of rows, without preparing or copying it.
    The source is Parquet, Lance, tar shards of WebDataset, or Arrow files of `datasets` on a disk."""

    stream_groups: PositiveInt = STREAM_GROUPS
    """The number of groups of rows of a stream that are shuffled together. Each process that reads samples
    holds at most so many in memory. A group is a row group of Parquet, a fragment of Lance or 8 MiB of a
    larger one, a record batch of Arrow, or 8 MiB of a tar shard."""

    @model_validator(mode="after")
    def _stream_fits(self) -> Self:
        if self.stream and self.memory_gib is not None:
            raise PydanticCustomError(
                "one_of",
                "memory_gib is for data that are held, and stream_groups says how much of a stream is in "
                "memory: remove memory_gib",
            )
        if not self.stream and self.stream_groups != STREAM_GROUPS:
            raise PydanticCustomError("one_of", "stream_groups means nothing without stream: true")
        return self


class Data(Loading):
    """The data set of a run, and the loader that makes batches of it."""

    source: Annotated[
        str,
        AfterValidator(_require_source),
        Field(description=describe_sources(IMAGES, TEXT, CHATS)),
    ]

    text_files: Annotated[str, StringConstraints(min_length=1)] | None = None
    """The pattern of the names of text files in a folder and its sub-folders, such as `*.md`. The default is
    `*.txt`."""

    valid_source: Annotated[str, AfterValidator(_require_source)] | None = None
    """The source of validation images or text. Without it, `valid_share` of `source` is kept for
    validation."""

    valid_share: Annotated[float, Field(gt=0, lt=1, strict=False)] = 0.2
    """The share of each class, or of the end of each text file, that is kept for validation if the source has
    no validation split."""

    endpoint: Endpoint | None = None
    """The address of the S3 server of the sources. The default is the endpoint of the storage, or AWS."""

    image_column: str = "image"
    """The column of the images: paths in a manifest, bytes or pixels in Parquet and Lance."""

    label_column: str = "label"
    """The column of the labels: numbers from 0, or names."""

    augment: Augment = Augment()
    """Random changes of training images."""

    max_bad_samples: NonNegativeInt = 0
    """The largest number of samples that are left out because they cannot be read; more are an error."""

    @model_validator(mode="after")
    def _memory_is_held(self) -> Self:
        if self.memory_gib is not None and self.loader == "torch":
            raise PydanticCustomError(
                "one_of",
                "memory_gib means nothing to loader: torch, which maps files into memory: remove it, or set "
                "loader: ray",
            )
        return self


def require_stream_fits(data: Data) -> None:
    """Raise PydanticCustomError for a stream of what cannot be streamed."""
    if not data.stream:
        return
    for source in filter(None, (data.source, data.valid_source)):
        if source in BUILT_IN:
            raise PydanticCustomError(
                "one_of", f"stream: {source} comes with a package and is no file: remove stream"
            )
        require_streamed(source)
    if data.max_bad_samples:
        raise PydanticCustomError(
            "one_of",
            "max_bad_samples is counted by a preparation, and stream: true makes none: remove one of them",
        )


class Table(Section):
    """The table that `gradient_boosting` learns from."""

    source: Annotated[
        str, AfterValidator(_require_source), Field(description=describe_sources(TABLES))
    ]

    valid_source: Annotated[str, AfterValidator(_require_source)] | None = None
    """The source of validation rows, with the same columns. Without it, `valid_share` of `source` is kept."""

    valid_share: Annotated[float, Field(gt=0, lt=1, strict=False)] = 0.2
    """The share of the rows that is kept for validation, drawn with the seed of the run."""

    endpoint: Endpoint | None = None
    """The address of the S3 server of the sources. The default is the endpoint of the storage, or AWS."""

    label_column: str = "label"
    """The column of the labels: numbers for `regression`; numbers, booleans or text for classes."""

    feature_columns: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] | None = None
    """The feature columns, which hold numbers. The default is all columns but the label and a data frame's
    index."""


def require_known(data: Data | Table, recipe: str) -> None:
    """Raise PydanticCustomError for a built-in data set that the recipe cannot train on."""
    usable = ", ".join(source.name for source in sources_for(recipe) if source.is_built_in)
    for key in ("source", "valid_source"):
        name = getattr(data, key)
        built_in = BUILT_IN.get(name)
        if built_in is not None and recipe not in built_in.recipes:
            raise PydanticCustomError(
                "one_of",
                f"data.{key} = {name} is for train.recipe = {', '.join(built_in.recipes)}, not for {recipe}: "
                f"use {usable}, a path, or another recipe",
            )
