"""Random numbers for samples: they depend on seed, epoch and the sample's id alone.

So they are the same at any number of workers and on every device, and a run that resumes within an epoch
needs no generator's state for them.
"""

from __future__ import annotations

import torch


def random_numbers(ids: torch.Tensor, seed: int, epoch: int, *, stream: int) -> torch.Tensor:
    """One number from 0 to 2**31 - 1 for each id: int64 in the shape of `ids`, equal on every device.

    The mixing function of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
    2014), whose shifts fill with zeros, which torch's do not.
    """
    start = (seed * 3 + stream) * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03
    mixed = (ids + _signed(start)) * _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ ((mixed >> 30) & (2**34 - 1))) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ ((mixed >> 27) & (2**37 - 1))) * _signed(0x94D049BB133111EB)
    return (mixed >> 33) & (2**31 - 1)


def _signed(number: int) -> int:
    """The number's last 64 bits, as int64 has them."""
    return (number + 2**63) % 2**64 - 2**63
