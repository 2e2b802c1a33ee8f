"""The buffers of a network, those of batch norm in one block of memory, so that copying them costs little.

A network can have hundreds of buffers with a few numbers each. Copying each by itself in every step would
cost more than a hundredth of a small step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Place = tuple[nn.Module, str]
"""A module and the name of one of its buffers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBlock:
    """A block of memory with the buffers of one data type."""

    memory: Tensor
    places: tuple[Place, ...]
    views: tuple[Tensor, ...]
    """The part of each buffer."""
    addresses: tuple[int, ...]

    @classmethod
    def of(cls, places: list[Place]) -> MemoryBlock:
        """Move buffers into a new block."""
        buffers = [buffer_at(each) for each in places]
        memory = torch.cat([each.detach().reshape(-1) for each in buffers])
        parts = memory.split([each.numel() for each in buffers])
        views = tuple(part.view(buffer.shape) for part, buffer in zip(parts, buffers, strict=True))
        for buffer, view in zip(buffers, views, strict=True):
            buffer.data = view
        return cls(
            memory=memory,
            places=tuple(places),
            views=views,
            addresses=tuple(view.data_ptr() for view in views),
        )

    def current(self) -> Tensor:
        """Return the memory with the current values, also of buffers that code has moved out of it."""
        for place, view, address in zip(self.places, self.views, self.addresses, strict=True):
            buffer = buffer_at(place)
            if buffer.data_ptr() != address:
                view.copy_(buffer)
                buffer.data = view
        return self.memory


class BufferBlocks:
    """The buffers of a network in as few tensors as possible."""

    def __init__(self, network: nn.Module) -> None:
        """Move the buffers of batch norm, which only change in place, into a block for each data type."""
        normed: defaultdict[torch.dtype, list[Place]] = defaultdict(list)
        self._others: list[Place] = []
        seen: set[int] = set()
        for module in network.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                if isinstance(module, _NormBase):
                    normed[buffer.dtype].append((module, name))
                else:
                    self._others.append((module, name))
        self._blocks = [MemoryBlock.of(places) for places in normed.values()]

    def tensors(self) -> list[Tensor]:
        """Return the tensors that hold all buffers now; changing them changes the buffers."""
        blocks = [block.current() for block in self._blocks]
        return [*blocks, *map(buffer_at, self._others)]


def buffer_at(place: Place) -> Tensor:
    """Return a buffer of a module."""
    module, name = place
    buffer = module._buffers[name]
    assert buffer is not None
    return buffer
