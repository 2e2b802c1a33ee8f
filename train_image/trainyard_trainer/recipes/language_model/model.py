"""The network of a language model: a transformer that tells from tokens of text which one comes next."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from trainyard_trainer.config.training.models import Gpt
from trainyard_trainer.data.sources.tokens.byte_rows import SEPARATOR


class Vocabulary(NamedTuple):
    """The tokens that a network knows."""

    size: int
    separator: int | None
    """The token that stands between two documents; None if all tokens of a row are one document."""


BYTES = Vocabulary(size=256, separator=SEPARATOR)
"""The vocabulary without a tokenizer: each byte is a token."""

SPREAD = 0.02
"""Standard deviation of initial weights (Radford et al.: Improving language understanding by generative
pre-training, 2018)."""

MLP_FACTOR = 4
"""Width of the hidden layer behind each attention, by that of the model."""


class Memory:
    """What each attention knows of the tokens that were given so far, so that they are not computed again."""

    def __init__(self) -> None:
        self.length = 0
        self._known: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def joined(
        self, attention: nn.Module, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, (N, H, T, W / H), of all tokens; `key` and `value` are of the new ones."""
        if attention in self._known:
            before_key, before_value = self._known[attention]
            key, value = (
                torch.cat([before_key, key], dim=2),
                torch.cat([before_value, value], dim=2),
            )
        self._known[attention] = key, value
        return key, value


class Transformer(nn.Module):
    """Scores of the next token, (N, T, vocabulary), for each token (N, T) int64; T is at most the context.

    A separator begins a document, and one document knows nothing of another in its row: attention stays
    within it, and its positions count from its own start. With a memory the tokens go on after those that it
    knows, all of one document. Without a separator a row is one document. The embedding of tokens is called
    `bytes`, as checkpoints know it.
    """

    def __init__(self, config: Gpt, vocabulary: Vocabulary = BYTES) -> None:
        super().__init__()
        self.separator = vocabulary.separator
        self.bytes = nn.Embedding(vocabulary.size, config.width)
        self.positions = nn.Embedding(config.context_length, config.width)
        self.dropout = nn.Dropout(config.dropout)
        blocks = [Block(config) for _ in range(config.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(config.width)
        self.apply(_init)
        # What blocks add up grows with their number: Radford et al.: Language models are unsupervised
        # multitask learners, 2019, section 2.3.
        for block in blocks:
            for last in (block.attention.out, block.narrow):
                nn.init.normal_(last.weight, std=SPREAD / (2 * config.layers) ** 0.5)

    def forward(self, tokens_NT: torch.Tensor, memory: Memory | None = None) -> torch.Tensor:
        places_NT, sees_NTT = self._layout(tokens_NT, memory)
        x_NTW = self.dropout(self.bytes(tokens_NT) + self.positions(places_NT))
        for block in self.blocks:
            x_NTW = block(x_NTW, sees_NTT, memory)
        # The same table tells tokens what they are and scores what they may be.
        return functional.linear(self.norm(x_NTW), self.bytes.weight)

    def _layout(
        self, tokens_NT: torch.Tensor, memory: Memory | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the place of each token, and which tokens it sees; None for all before it."""
        if memory is not None:
            return following(tokens_NT, memory)
        if self.separator is not None:
            return layout(tokens_NT, self.separator)
        return torch.arange(tokens_NT.shape[1], device=tokens_NT.device)[None], None


class Block(nn.Module):
    """Attention, then a network for each token; both add to what comes in, and normalise it first."""

    def __init__(self, config: Gpt) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.before_mlp = nn.LayerNorm(config.width)
        self.widen = nn.Linear(config.width, MLP_FACTOR * config.width)
        self.narrow = nn.Linear(MLP_FACTOR * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_NTW: torch.Tensor, sees_NTT: torch.Tensor | None, memory: Memory | None = None
    ) -> torch.Tensor:
        found = self.attention(self.before_attention(x_NTW), sees_NTT, memory)
        x_NTW = x_NTW + self.dropout(found)
        hidden = functional.gelu(self.widen(self.before_mlp(x_NTW)))
        return x_NTW + self.dropout(self.narrow(hidden))


class Attention(nn.Module):
    """Each token gathers from those that it sees, by several heads."""

    def __init__(self, config: Gpt) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.inward = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(
        self, x_NTW: torch.Tensor, sees_NTT: torch.Tensor | None, memory: Memory | None = None
    ) -> torch.Tensor:
        count, length, width = x_NTW.shape
        parts = self.inward(x_NTW).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # (N, H, T, W / H) each
        if memory is not None:
            key, value = memory.joined(self, key, value)
        found = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if sees_NTT is None else sees_NTT.unsqueeze(1),
            is_causal=sees_NTT is None,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(found.transpose(1, 2).reshape(count, length, width))


def layout(
    tokens_NT: torch.Tensor, separator: int = SEPARATOR
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token its place in its document, (N, T), and which tokens it sees, (N, T, T) bool.

    It sees itself and what is before it, back to the separator before its document.
    """
    begins_NT = tokens_NT == separator
    document_NT = begins_NT.cumsum(dim=1)
    place = torch.arange(tokens_NT.shape[1], device=tokens_NT.device)
    first_NT = torch.where(begins_NT, place, 0).cummax(dim=1).values
    is_same_NTT = document_NT.unsqueeze(2) == document_NT.unsqueeze(1)
    is_past_TT = place.unsqueeze(1) >= place
    return place - first_NT, is_same_NTT & is_past_TT


def following(tokens_NT: torch.Tensor, memory: Memory) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, (1, T) and (1, T, all), of tokens behind those that the memory knows, which it counts now."""
    before, memory.length = memory.length, memory.length + tokens_NT.shape[1]
    place = torch.arange(memory.length, device=tokens_NT.device)
    return place[None, before:], place[None, before:, None] >= place


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=SPREAD)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def title_of(config: Gpt) -> str:
    """Return the size of the network in a few words, for titles."""
    unit = "tokens" if config.has_tokens else "bytes"
    return f"{config.layers} layers of width {config.width} over {config.context_length} {unit}"
