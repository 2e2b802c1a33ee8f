"""The sections `train` and `data` of a run with the user's own recipe."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from trainyard_trainer.config.data.section import MEMORY_GIB, Loading
from trainyard_trainer.config.data.streaming import require_streamed
from trainyard_trainer.config.section import Endpoint, Location
from trainyard_trainer.config.training.optimizers import AdamW, AnyOptimizer, Optimizer
from trainyard_trainer.config.training.train import Train
from trainyard_trainer.config.user_code import Reference

OWN_RECIPE = "own_recipe"
"""The kind of a run with the user's own recipe."""


class OwnRecipe(Train):
    """A recipe of the user: a class in the folder that `code` names."""

    recipe: Reference
    """The recipe's class as `module:Class`: a subclass of `trainyard_trainer.recipes.Recipe`."""

    model: dict[str, Any] = Field(default_factory=dict)
    """The settings of the recipe, which its class `Settings` validates."""

    optimizer: Optimizer = AdamW(name="adamw")

    optimizers: dict[str, Optimizer] = Field(default_factory=dict)
    """The optimizers of single networks, by name, for a recipe that trains several networks in turn
    (`Recipe.networks`), such as the generator of a GAN. The other networks have `optimizer`."""

    def optimizer_of(self, network: str | None) -> AnyOptimizer:
        """Return the optimizer of one of the recipe's networks; None is the whole model."""
        return self.optimizer if network is None else self.optimizers.get(network, self.optimizer)


class OwnData(Loading):
    """The data of a user's recipe: a data set of the user, or a table at a path."""

    dataset: Reference | None = None
    """The function or class as `module:name`, in the folder that `code` names. It is called once with
    `split="train"` and once with `split="valid"`, and returns an object with `__len__` and `__getitem__`,
    whose samples are mappings of column names to tensors, arrays or numbers."""

    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the function, by name."""

    source: Location | None = None
    """The path or `s3://` URL of a table, in place of `dataset`: a file or a folder of CSV, JSON lines,
    Parquet, Lance, NumPy, Arrow files of `datasets`, or tar shards of WebDataset. With `*` or `?` it is a
    pattern of names, such as `/data/part-*.parquet`. A data set of Lance may have a version behind its name,
    as in `/data/photos.lance@3`. Files or folders named `train` and `valid` are the splits."""

    columns: Annotated[tuple[str, ...], Field(min_length=1, strict=False)] | None = None
    """The columns of the table that a sample has. The default is all of them."""

    valid_share: Annotated[float, Field(gt=0, lt=1, strict=False)] = 0.2
    """The share of the rows of a table that is kept for validation, if it has no split for it."""

    endpoint: Endpoint | None = None
    """The address of the S3 server of the table. The default is the endpoint of the storage, or AWS."""

    @property
    def memory_bytes(self) -> float:
        """The bytes of a table that each process may hold."""
        return (self.memory_gib or MEMORY_GIB) * 2**30

    @model_validator(mode="after")
    def _has_one_origin(self) -> OwnData:
        if (self.dataset is None) == (self.source is None):
            raise PydanticCustomError(
                "one_of",
                "needs either dataset, a class or function of yours, or source, the path of a table",
            )
        origin, others = (
            ("source", ("options",)) if self.source else ("dataset", ("columns", "endpoint"))
        )
        if self.stream:
            if self.source is None:
                raise PydanticCustomError(
                    "one_of",
                    "stream is for a source. A dataset of yours reads what it likes: remove stream",
                )
            require_streamed(self.source)
        if self.memory_gib is not None and self.source is None:
            raise PydanticCustomError(
                "one_of",
                "memory_gib is for a source. A dataset of yours holds what it likes: remove it",
            )
        for key in others:
            if getattr(self, key):
                raise PydanticCustomError(
                    "one_of", f"{key} means nothing to data.{origin}: remove it"
                )
        return self
