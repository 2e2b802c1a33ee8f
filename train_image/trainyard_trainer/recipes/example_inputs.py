"""Example inputs of a network, with which an exported network is traced and compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleInputs:
    """The arguments of a network's `forward` for some samples."""

    tensors: Mapping[str, Tensor]
    """The arguments in their order, by the name that ONNX gives to each. The first axis of each tensor has
    the samples, and its size may vary in an exported network."""

    free_axes: Mapping[int, int] = field(default_factory=dict)
    """Further axes whose size may vary, with the largest size of each."""
