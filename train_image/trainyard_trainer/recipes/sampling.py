"""The choice of the next token from the scores of a language model, and the end of a text."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor


def chosen(scores: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Choose a token for each row of scores (N, vocabulary) in host memory: int64 (N,).

    At temperature 0 it is the most likely one; below 1 likely ones become more likely.
    """
    if temperature == 0:
        return scores.argmax(dim=1)
    # The largest score stays at 0, however small the temperature.
    below = scores - scores.max(dim=1, keepdim=True).values
    shares = (below / temperature).softmax(dim=1)
    return torch.multinomial(shares, 1, generator=generator)[:, 0]


def chosen_by(scores: Tensor, temperature: float, numbers: Tensor) -> Tensor:
    """Choose a token for each row of scores (N, vocabulary) by its number from 0 to 1: int64 (N,).

    The choice of a row does not depend on the other rows. At temperature 0 it is the most likely token.
    """
    if temperature == 0:
        return scores.argmax(dim=1)
    below = scores.double() - scores.max(dim=1, keepdim=True).values
    sums = (below / temperature).exp().cumsum(dim=1)
    wanted = numbers[:, None].to(sums) * sums[:, -1:]
    return torch.searchsorted(sums, wanted, right=True)[:, 0]


def until_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """Return the tokens before the first one that ends a text."""
    places = [place for place, token in enumerate(tokens) if token in ends]
    return tokens[: places[0]] if places else tokens
