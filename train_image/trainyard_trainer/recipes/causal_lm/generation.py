"""Texts that a language model writes on from prompts, with and without the cache of Transformers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from trainyard_trainer.recipes.random_numbers import random_numbers
from trainyard_trainer.recipes.sampling import chosen, chosen_by

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


def until_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """Return the tokens before the first one that ends a text."""
    places = [place for place, token in enumerate(tokens) if token in ends]
    return tokens[: places[0]] if places else tokens


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
    longest = max(map(len, prompts))
    padded = [[padding] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    sampling = _SamplingByRow(torch.tensor(rows), longest, temperature, seed)
    with torch.inference_mode():
        found = model.generate(
            input_ids=torch.tensor(padded, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
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
