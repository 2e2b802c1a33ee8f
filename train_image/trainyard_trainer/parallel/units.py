"""The blocks of a network that are gathered, recomputed or compiled one at a time."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

UNIT_PARAMETERS = 10_000
"""The smallest number of parameters of a unit. Smaller blocks are gathered together with the module around
them, because each collective operation has a latency."""


def units(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks that are gathered as units: the large items of `Sequential` and `ModuleList`."""
    for name, module in network.named_children():
        if _is_sequence(module):
            yield from units(module)
        elif _is_sequence(network) and name:
            if sum(each.numel() for each in module.parameters()) >= UNIT_PARAMETERS:
                yield module
        else:
            yield from units(module)


def _is_sequence(module: nn.Module) -> bool:
    return type(module) in (nn.Sequential, nn.ModuleList)
