"""The base class of all sections of a run file, and the types that several sections use."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from trainyard_trainer.config.location import endpoint_problem, location_problem

PositiveNumber = Annotated[float, Field(gt=0, strict=False, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, strict=False, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, strict=False)]
Share = Annotated[float, Field(gt=0, le=1, strict=False)]


def _require_location(location: str) -> str:
    if (problem := location_problem(location)) is not None:
        raise PydanticCustomError("location", "{problem}", {"problem": problem})
    return location


def _require_endpoint(endpoint: str) -> str:
    if (problem := endpoint_problem(endpoint)) is not None:
        raise PydanticCustomError("location", "{problem}", {"problem": problem})
    return endpoint


METRIC_NAME = r"^val_[a-z][a-z0-9_]*$"


def _require_validation(name: str) -> str:
    if not re.match(METRIC_NAME, name):
        raise PydanticCustomError(
            "one_of",
            "{name} is no metric of the validation; their names begin with val_",
            {"name": name},
        )
    return name


MetricName = Annotated[
    str,
    AfterValidator(_require_validation),
    WithJsonSchema({"type": "string", "pattern": METRIC_NAME}),
]
"""The name of a validation metric, such as `val_loss`."""

Location = Annotated[str, AfterValidator(_require_location)]
"""A path, or `s3://bucket/prefix`."""

Endpoint = Annotated[str, AfterValidator(_require_endpoint)]
"""The address of an S3 server."""


class Section(BaseModel):
    """A part of a run file: closed, frozen, each field with a description."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        # An infinite number travels as Infinity, which pydantic and json read back.
        ser_json_inf_nan="constants",
        # A section is compiled when it is used: a run file has few of them.
        defer_build=True,
    )


class Settings(Section):
    """The base class of the settings of a user's recipe: the keys of `train.model`."""

    # An error of the user's class is to appear where it is defined.
    model_config = ConfigDict(defer_build=False)
