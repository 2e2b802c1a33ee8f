"""Text that a language model writes on from a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainyard_trainer.data.sources.tokens.byte_rows import SEPARATOR
from trainyard_trainer.recipes.language_model.model import Memory
from trainyard_trainer.recipes.sampling import chosen, until_end


def continued(
    network: nn.Module,
    prompt: Sequence[int],
    *,
    count: int = 1,
    length: int,
    context_length: int,
    temperature: float,
    seed: int,
    separator: int | None = SEPARATOR,
) -> list[list[int]]:
    """What may follow the prompt: `count` texts of at most `length` tokens, the same for the same seed.

    A text ends where the model ends its document. Where it outgrows the context, the model goes on from the
    last half of that. At temperature 0 each token is the likeliest one; below 1 likely ones become likelier.
    """
    assert separator is not None, "without a tokenizer there is no text"
    random = torch.Generator().manual_seed(seed)
    device = next(network.parameters()).device
    # A separator in front: the prompt is the beginning of a document.
    written = torch.tensor([[separator, *prompt]] * count)
    begun = written.shape[1]
    memory, unread = Memory(), written
    with torch.inference_mode():
        while written.shape[1] < begun + length:
            if memory.length + unread.shape[1] > context_length:
                memory, unread = Memory(), written[:, -(context_length // 2) :]
            scores = network(unread.to(device), memory)[:, -1].float().cpu()
            unread = chosen(scores, temperature, random)[:, None]
            written = torch.cat([written, unread], dim=1)
            if (written[:, begun:] == separator).any(dim=1).all():
                break
    return [until_end(row, {separator}) for row in written[:, begun:].tolist()]
