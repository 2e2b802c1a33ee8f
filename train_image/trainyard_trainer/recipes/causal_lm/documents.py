"""Documents in rows of tokens: where each one begins, and which tokens are learnt."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trainyard_trainer.data.prepared import LEARNT, STARTS_DOCUMENT

IGNORED = -100
"""The target of tokens behind which nothing is learnt, as in PyTorch's cross entropy."""


class Documents(NamedTuple):
    """Where the tokens of a batch lie in their documents, and which of them are learnt."""

    positions: Tensor
    """(N, T) int64: the place of each token in its document, counted from 0."""
    targets: Tensor
    """(N, T) int64: the token behind each one if it is learnt, else `IGNORED`."""


def documents_of(tokens: Tensor, flags: Tensor) -> Documents:
    """Find the documents of rows of tokens: `tokens` (N, T) int32 and `flags` (N, T) uint8, as prepared."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    first = torch.where((flags & STARTS_DOCUMENT).bool(), places, 0).cummax(dim=1).values
    targets = torch.full_like(tokens, IGNORED, dtype=torch.int64)
    is_learnt = (flags[:, 1:] & LEARNT).bool()
    targets[:, :-1] = torch.where(is_learnt, tokens[:, 1:].long(), IGNORED)
    return Documents(places - first, targets)
