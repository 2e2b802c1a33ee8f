"""`data`: what a run learns from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, StringConstraints
from pydantic_core import PydanticCustomError

from trainyard_trainer.config.data_sources import (
    BUILT_IN,
    IMAGES,
    TABLES,
    TEXT,
    describe_sources,
    sources_for,
)
from trainyard_trainer.config.section import Section


def _require_source(source: str) -> str:
    """Return the source if it is a built-in data set or a path.

    A path needs a slash, so that a misspelled name of a built-in data set is not taken for one.
    """
    if source in BUILT_IN or "/" in source:
        return source
    raise PydanticCustomError(
        "source",
        f"must be {', '.join(BUILT_IN)}, a path with a slash in it such as ./{source}, "
        "or s3://bucket/prefix",
    )


class Augment(Section):
    """How training images are changed at random, on the device; each epoch in another way."""

    flip: bool = False
    """Mirror an image from left to right, one time in two."""

    crop: NonNegativeInt = 0
    """Move an image by up to so many pixels up, down, left and right; black comes in."""


class Data(Section):
    """What to train on, and who feeds it."""

    source: Annotated[
        str, AfterValidator(_require_source), Field(description=describe_sources(IMAGES, TEXT))
    ]

    text_files: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Which files of a folder are text, by their names, such as `*.md`; without it `*.txt`. Those in
    sub-folders count, too."""

    valid_source: Annotated[str, AfterValidator(_require_source)] | None = None
    """Validation images or text; without them, `valid_share` of the source."""

    valid_share: Annotated[float, Field(gt=0, lt=1, strict=False)] = 0.2
    """Share of each class, or of the end of each text file, that is kept for validation where the source
    has no part for it."""

    endpoint: str | None = None
    """Address of the sources' S3 server, if it is neither AWS nor the storage's own."""

    image_column: str = "image"
    """Column of the images: paths in a manifest, bytes or pixels in Parquet."""

    label_column: str = "label"
    """Column of the labels: numbers from 0, or names."""

    loader: Literal["torch", "ray"] = "torch"
    """Who makes the batches: a torch DataLoader in each worker, or Ray Data."""

    decode_workers: NonNegativeInt | None = None
    """Processes of each worker that decode images for the torch loader; without it as many as the worker has
    CPUs beside its first, and none where there is nothing to decode."""

    ray_nodes: dict[str, str] | None = None
    """Labels of the nodes on which the Ray loader reads and decodes, such as `{ray-subcluster: data}`;
    without them it may use any node."""

    shuffle: bool = True
    """Train on the samples in a new order each epoch, the same for the same seed."""

    augment: Augment = Augment()
    """Random changes of training images."""

    drop_last: bool = True
    """Leave out, in each epoch, what does not fill a global batch; else the last batch is smaller."""

    max_bad_samples: NonNegativeInt = 0
    """How many samples that cannot be read may be left out, in all."""


class Table(Section):
    """The rows that `gradient_boosting` learns from."""

    source: Annotated[
        str, AfterValidator(_require_source), Field(description=describe_sources(TABLES))
    ]

    valid_source: Annotated[str, AfterValidator(_require_source)] | None = None
    """Rows for validation, with the same columns; without them, `valid_share` of the source."""

    valid_share: Annotated[float, Field(gt=0, lt=1, strict=False)] = 0.2
    """Share of the rows that is kept for validation, drawn with the run's seed."""

    endpoint: str | None = None
    """Address of the sources' S3 server, if it is neither AWS nor the storage's own."""

    label_column: str = "label"
    """What is learnt: numbers, or for classes names, too."""

    feature_columns: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] | None = None
    """What it is learnt from: columns of numbers; without it all but the label's."""


def require_known(data: Data | Table, recipe: str) -> None:
    """Raise PydanticCustomError for a built-in data set that the recipe cannot train on."""
    own = ", ".join(source.name for source in sources_for(recipe) if source.is_built_in)
    for key in ("source", "valid_source"):
        name = getattr(data, key)
        built_in = BUILT_IN.get(name)
        if built_in is not None and recipe not in built_in.recipes:
            raise PydanticCustomError(
                "one_of",
                f"data.{key} = {name} is for train.recipe = {', '.join(built_in.recipes)}, not for {recipe}: "
                f"use {own}, a path, or another recipe",
            )
