"""Texts that a language model writes on from prompts, with and without the cache of Transformers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from trainyard_trainer.recipes.causal_lm.network import Decoding
from trainyard_trainer.recipes.random_numbers import random_numbers
from trainyard_trainer.recipes.sampling import chosen_by, until_end


def continued(
    model: Callable[..., Tensor],
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    temperature: float,
    seed: int,
    ends: Collection[int],
    padding: int,
    device: torch.device,
    unfinished: Callable[[int], int],
) -> list[list[int]]:
    """Return up to `length` tokens behind each prompt; the same seed gives the same ones.

    `model` is a network of this recipe, which may be sharded. `unfinished` takes the number of texts that
    have not ended, and returns 0 when the model need not be called again: workers that share a model have to
    call it equally often. At temperature 0 each token is the most likely one.
    """
    tokens, mask = left_padded(prompts, padding)
    decoding, rows = Decoding(mask.to(device)), torch.arange(len(prompts))
    written = tokens[:, :0]
    last = torch.tensor(sorted(ends), dtype=torch.int64)
    for place in range(length):
        scores = model(tokens.to(device), decoding=decoding).float().cpu()
        tokens = chosen_by(scores, temperature, numbers_of(rows, seed, place))[:, None]
        written = torch.cat([written, tokens], dim=1)
        has_ended = torch.isin(written, last).any(dim=1)
        if not unfinished(int((~has_ended).sum())):
            break
        decoding.mask = torch.cat([decoding.mask, torch.ones_like(decoding.mask[:, :1])], dim=1)
    return [until_end(row, ends) for row in written.tolist()]


def left_padded(prompts: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Return prompts with padding before the short ones, and a mask that is 0 for it: both (N, T) int64."""
    longest = max(map(len, prompts))
    rows = [[padding] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(rows), torch.tensor(mask)


def generated(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    rows: Sequence[int],
    length: int,
    temperature: float,
    seed: int,
    ends: Collection[int],
    padding: int,
) -> list[list[int]]:
    """Return up to `length` tokens behind each prompt, by `generate` of Transformers, which is fast.

    `rows` are numbers of the prompts: the random numbers of a text follow from it, the seed and the place in
    the text alone, so the other prompts do not matter.
    """
    from transformers import GenerationConfig

    tokens, mask = left_padded(prompts, padding)
    longest = tokens.shape[1]
    # The folder's penalties and beams would give other texts than `continued`.
    model.generation_config = GenerationConfig()
    sampling = _SamplingByRow(torch.tensor(rows), longest, temperature, seed)
    with torch.inference_mode():
        found = model.generate(
            input_ids=tokens.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=length,
            eos_token_id=sorted(ends),
            pad_token_id=padding,
            # The processor leaves one token, which is then the most likely one.
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            logits_processor=[sampling] if temperature > 0 else [],
        )
    return [until_end(tokens, ends) for tokens in found[:, longest:].tolist()]


class _SamplingByRow:
    """A logits processor of Transformers that leaves one token of each row, chosen at random."""

    def __init__(self, rows: Tensor, prompt_tokens: int, temperature: float, seed: int) -> None:
        self._rows = rows
        self._prompt_tokens = prompt_tokens
        self._temperature = temperature
        self._seed = seed

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        numbers = numbers_of(self._rows, self._seed, input_ids.shape[1] - self._prompt_tokens)
        tokens = chosen_by(scores, self._temperature, numbers.to(scores.device))
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)


def numbers_of(rows: Tensor, seed: int, place: int) -> Tensor:
    """Return a random number from 0 to 1 for each row, (N,) float64, at a place of its text."""
    return (random_numbers(rows, seed, place, stream=0).double() + 0.5) / 2**31
