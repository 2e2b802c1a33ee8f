"""The network of `causal_lm`: a model of Transformers, and the loss of its output layer."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainyard_trainer.recipes.causal_lm.documents import IGNORED, Documents

ASSIGNMENT = re.compile(r"^\s+(?:lm_)?logits\s*[-+*/]?= ", re.MULTILINE)
"""A statement that sets or changes the scores of a model."""


class Decoding:
    """Texts that a model writes token by token: which of their tokens count, and its cache of them."""

    def __init__(self, mask: Tensor) -> None:
        """`mask` (N, T) is 0 for the padding before a text, else 1. It grows with the texts."""
        self.mask = mask
        self.cache: Any = None
        """The keys and values of all tokens that were read."""


class CausalNetwork(nn.Module):
    """A language model that returns the sum of the losses of its targets, or its scores.

    The output layer and the cross entropy are computed together in chunks, so that the scores of all tokens
    never exist at once. Models that change the scores behind their output layer compute all of them.
    """

    def __init__(self, model: nn.Module, *, is_flattened: bool = False) -> None:
        """`is_flattened` puts the rows of a batch behind each other, as FlashAttention wants documents."""
        super().__init__()
        self.model = model
        self._is_flattened = is_flattened
        self._has_plain_scores = has_plain_scores(model)

    def forward(
        self,
        tokens: Tensor,
        documents: Documents | None = None,
        *,
        by_row: bool = False,
        decoding: Decoding | None = None,
    ) -> Tensor:
        """Return the sum of the losses of the targets; without documents the scores (N, T, vocabulary).

        `tokens` is (N, T), integers. If `by_row`, the sum of each row is returned, (N,). With `decoding` the
        tokens follow those of earlier calls, and the scores (N, vocabulary) behind the last one are returned.
        """
        tokens = tokens.long()
        if decoding is not None:
            return self._next_scores(tokens, decoding)
        if documents is None:
            return self._scores(input_ids=tokens)
        positions, targets = documents.positions, documents.targets.flatten()
        if self._is_flattened:
            tokens, positions = tokens.flatten()[None], positions.flatten()[None]
        # Transformers finds documents by their positions only without a mask and without a cache.
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": positions,
        }
        if by_row:
            return self._losses_of_rows(inputs, documents.targets)
        if not self._has_plain_scores:
            scores = self._scores(**inputs).float().flatten(0, 1)
            return functional.cross_entropy(scores, targets, ignore_index=IGNORED, reduction="sum")
        hidden = self._body(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        return loss_of_head(hidden, self.model.get_output_embeddings(), targets)  # type: ignore[operator]

    @property
    def _body(self) -> nn.Module:
        """The model without its output layer."""
        body: nn.Module = getattr(self.model, str(self.model.base_model_prefix))
        return body

    def _losses_of_rows(self, inputs: dict[str, Any], targets: Tensor) -> Tensor:
        """Return the sum of the losses of each row, (N,). Scores of other tokens are not kept."""
        is_target = targets.flatten() != IGNORED
        if self._has_plain_scores:
            hidden = self._body(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
            scores = self.model.get_output_embeddings()(hidden[is_target])  # type: ignore[operator]
        else:
            scores = self._scores(**inputs).flatten(0, 1)[is_target]
        wanted = targets.flatten()[is_target]
        losses = functional.cross_entropy(scores.float(), wanted, reduction="none")
        rows = torch.arange(len(targets), device=targets.device)
        rows = rows.repeat_interleave(targets.shape[1])[is_target]
        return losses.new_zeros(len(targets)).index_add(0, rows, losses)

    def _next_scores(self, tokens: Tensor, decoding: Decoding) -> Tensor:
        positions = (decoding.mask.cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "attention_mask": decoding.mask,
            "position_ids": positions,
            "cache": decoding.cache,
            "use_cache": True,
        }
        if self._has_plain_scores:
            found = self._body(**inputs)
            hidden = found.last_hidden_state[:, -1]
            scores: Tensor = self.model.get_output_embeddings()(hidden)  # type: ignore[operator]
        else:
            found = self.model(**inputs)
            scores = found.logits[:, -1]
        decoding.cache = found.cache
        return scores

    def _scores(self, **inputs: Tensor) -> Tensor:
        scores: Tensor = self.model(**inputs, use_cache=False).logits
        return scores


def loss_of_head(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    """Return the summed cross entropy of an output layer: `hidden` is (N, width), `targets` (N,)."""
    if hidden.device.type == "cpu":
        # On a CPU the number of targets is known at once, and the other tokens then cost nothing.
        is_learnt = targets != IGNORED
        hidden, targets = hidden[is_learnt], targets[is_learnt]
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = bias.to(dtype) if bias is not None else None
    return functional.linear_cross_entropy(
        hidden.to(weight.dtype),
        weight,
        targets,
        linear_bias=bias,
        reduction="sum",
        ignore_index=IGNORED,
        options=nn.LinearCrossEntropyOptions(),
    ).float()


def has_plain_scores(model: nn.Module) -> bool:
    """Whether a model's scores are what its output layer computes, such as without soft capping.

    Then its `forward` assigns the scores once.
    """
    if not isinstance(model.get_output_embeddings(), nn.Linear):  # type: ignore[operator]
        return False
    return len(ASSIGNMENT.findall(inspect.getsource(type(model).forward))) == 1
