"""Convert the metrics that user code reports to JSON.

| reported | recorded |
|---|---|
| number of Python, NumPy or torch, also an array or tensor without dimensions | number |
| Decimal, Fraction | number |
| boolean | boolean |
| NaN, infinity | null, since JSON has no such numbers |
| text, None | the same |
| list, tuple, set, array or tensor of up to 1,000 elements | list |
| mapping | object; its keys become text |
| sparse, quantized or nested tensor | the text of its type |
| anything else, such as a date | its text, of at most 1,000 characters |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

LIST_LIMIT = 1000
"""The largest number of elements of an array that is recorded in full."""

TEXT_LIMIT = 1000
"""The largest number of characters that are recorded of an object's text."""


def to_json_values(metrics: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert reported metrics to values that JSON can represent, as the table above says."""
    return {str(name): _plain(value) for name, value in metrics.items()}


def _plain(value: Any) -> Any:
    """Convert one value to a value that JSON can represent."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real | Decimal | Fraction):
        return _plain_number(value)
    if isinstance(value, Mapping):
        return to_json_values(value)
    if isinstance(value, list | tuple | AbstractSet):
        return [_plain(each) for each in value]
    return _plain_array(value) if _is_array(value) else str(value)[:TEXT_LIMIT]


def _plain_number(value: Real | Decimal | Fraction) -> float | None:
    """Return a number as a float, or None if no finite float has its size."""
    try:
        number = float(value)
    except (OverflowError, ValueError):  # a large fraction, a signalling NaN
        return None
    return number if math.isfinite(number) else None


def _is_array(value: Any) -> bool:
    """Return whether a value is an array or scalar of NumPy, torch or a library that follows NumPy."""
    return all(hasattr(type(value), name) for name in ("shape", "dtype", "tolist", "item"))


def _plain_array(array: Any) -> Any:
    """Return an array as a number or a list.

    The text of its type and shape stands for a large array, and for one without values that can be listed,
    such as a sparse, quantized or nested tensor.
    """
    try:
        if math.prod(array.shape) > LIST_LIMIT:
            return f"{array.dtype} {tuple(array.shape)}"
        values = array.tolist() if array.shape else array.item()
    except RuntimeError:  # torch raises no other
        return f"{type(array).__name__} {array.dtype}"
    # `tolist` and `item` return some values, such as dates, as NumPy objects.
    return str(values)[:TEXT_LIMIT] if _is_array(values) else _plain(values)
