"""What the sections of a run file have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveNumber = Annotated[float, Field(gt=0, strict=False, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, strict=False, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, strict=False)]
Share = Annotated[float, Field(gt=0, le=1, strict=False)]

Metric = Literal["val_accuracy", "val_loss"]


class Section(BaseModel):
    """A part of a run file: closed, frozen, each field with a description."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )
