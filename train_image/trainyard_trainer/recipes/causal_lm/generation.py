"""Texts that a language model writes on from prompts, with and without the cache of Transformers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from trainyard_trainer.recipes.sampling import chosen, until_end

Scores = Callable[[Tensor], Tensor]
"""Returns the scores (N, T, vocabulary) of tokens (N, T)."""


def continued(
    scores_of: Scores,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    temperature: float,
    seed: int,
    ends: Collection[int],
    device: torch.device,
) -> list[list[int]]:
    """Return up to `length` tokens behind each prompt; the same seed gives the same ones.

    It calls the model with the whole text for each token, so that it works with weights that are sharded
    over workers: all workers make the same calls. At temperature 0 each token is the most likely one.
    """
    generator = torch.Generator().manual_seed(seed)
    longest = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest + length, dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    rows, reached = torch.arange(len(prompts)), torch.tensor([len(each) for each in prompts])
    for _ in range(length):
        # Behind the end of a row lies padding, which no token before it sees.
        shown = tokens[:, : int(reached.max())]
        scores = scores_of(shown.to(device)).float().cpu()[rows, reached - 1]
        tokens[rows, reached] = chosen(scores, temperature, generator)
        reached = reached + 1
    return [
        until_end(row[len(prompt) : len(prompt) + length].tolist(), ends)
        for row, prompt in zip(tokens, prompts, strict=True)
    ]


def generated(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    temperature: float,
    seed: int,
    ends: Collection[int],
    padding: int,
) -> list[list[int]]:
    """Return up to `length` tokens behind each prompt, by `generate` of Transformers, which is fast."""
    longest = max(map(len, prompts))
    rows = [[padding] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    torch.manual_seed(seed)
    sampling: dict[str, Any] = {
        "do_sample": False,
        "temperature": None,
        "top_p": None,
        "top_k": None,
    }
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
    with torch.inference_mode():
        found = model.generate(
            input_ids=torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=length,
            eos_token_id=sorted(ends),
            pad_token_id=padding,
            **sampling,
        )
    return [until_end(row, ends) for row in found[:, longest:].tolist()]
