"""Answers of a fine-tuned language model: to one prompt, or turn by turn on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TextIO

import torch

from trainyard_trainer.config.training.recipes import CAUSAL_LM
from trainyard_trainer.data.prepared import PromptAs
from trainyard_trainer.data.sources.chats.examples import Question, WrongRow
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.causal_lm.network import CausalNetwork
from trainyard_trainer.recipes.causal_lm.recipe import CausalLanguage
from trainyard_trainer.recipes.causal_lm.texts.generation import generated
from trainyard_trainer.recipes.causal_lm.texts.prompts import Message, Prompts
from trainyard_trainer.recipes.saved_model import Saved


def prompts_for(saved: Saved, prompt_as: PromptAs | None) -> Prompts:
    """Return the tokenizer of a saved model, which writes prompts as training has, or as `prompt_as` says.

    Raises ConfigError for turns of a chat if there is no chat template.
    """
    recipe = saved.recipe
    assert isinstance(recipe, CausalLanguage)
    return Prompts(recipe.model.without_weights(), prompt_as or recipe.prompt_as)


class Assistant:
    """A saved language model that answers prompts and chats."""

    def __init__(
        self,
        saved: Saved,
        device: torch.device,
        *,
        length: int,
        temperature: float,
        seed: int,
        prompt_as: PromptAs | None = None,
    ) -> None:
        """Load the model: it writes at most `length` tokens, the same ones for the same seed.

        `prompt_as` tells what a prompt is: a user's turn, or a text to continue. None stands for what the
        rows of the training data were. Raises ConfigError for turns if there is no chat template.
        """
        network = saved.build().to(device)
        assert isinstance(network, CausalNetwork)
        self._model: Any = network.model
        self.prompts = prompts_for(saved, prompt_as)
        self._length = length
        self._options = {"length": length, "temperature": temperature, "seed": seed}

    def tokens_of(self, question: Question) -> list[int]:
        """Return the tokens of a question. Raises WrongRow if the model cannot answer it."""
        tokens = self.prompts.of_question(question)
        positions = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and len(tokens) + self._length > positions:
            raise WrongRow(
                f"it has {len(tokens):,} tokens, and with --length {self._length} that is more than the "
                f"{positions:,} positions of the model"
            )
        return tokens

    def answers(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> list[str]:
        """Return what the model writes behind prompts, which it reads together; `rows` number them."""
        options: dict[str, Any] = self._options
        found = generated(
            self._model,
            prompts,
            rows=rows,
            ends=self.prompts.ends,
            padding=self.prompts.padding,
            **options,
        )
        return [self.prompts.text_of(tokens) for tokens in found]

    def answer(self, prompt: str) -> str:
        """Return what the model writes behind a prompt, or answers to it."""
        return self._answer(Question(prompt=prompt), "--prompt")

    def reply(self, messages: Sequence[Message]) -> str:
        """Return the assistant's next turn of a chat."""
        return self._answer(Question(prompt=[*map(dict, messages)]), "the chat")

    def _answer(self, question: Question, name: str) -> str:
        """Return the answer to a question. Raises ConfigError, which calls it by `name`."""
        try:
            tokens = self.tokens_of(question)
        except WrongRow as reason:
            raise ConfigError(f"{name} cannot be answered: {reason}") from None
        return self.answers([tokens], [0])[0]


def chat(assistant: Assistant, lines: TextIO, out: TextIO) -> None:
    """Answer each line as a turn of one chat, until the lines end. An empty line begins another chat.

    Raises ConfigError for a model without a chat template.
    """
    if not assistant.prompts.has_template:
        raise ConfigError(
            "--chat needs a chat template, which the model's tokenizer lacks: use --prompt"
        )
    is_terminal = lines.isatty()
    messages: list[Message] = []
    for line in _turns(lines, out if is_terminal else None):
        if not line:
            messages = []
            continue
        messages.append({"role": "user", "content": line})
        reply = assistant.reply(messages)
        messages.append({"role": "assistant", "content": reply})
        print(reply, file=out, flush=True)


def _turns(lines: TextIO, prompt_to: TextIO | None) -> Iterator[str]:
    """Yield lines without white space around them; `prompt_to` gets a mark before each."""
    while True:
        if prompt_to is not None:
            print("> ", end="", file=prompt_to, flush=True)
        line = lines.readline()
        if not line:
            return
        yield line.strip()


def with_base_model(saved: Saved, path: str | None) -> Saved:
    """Return the saved model with its base model at another path, where the run's own is not reachable."""
    if path is None:
        return saved
    if saved.facts["recipe"] != CAUSAL_LM:
        raise ConfigError(
            f"--base-model is for runs of train.recipe = {CAUSAL_LM}, and {saved.facts['run']} is one of "
            f"{saved.facts['recipe']}"
        )
    model = {**saved.facts["model"], "path": path}
    return replace(saved, facts={**saved.facts, "model": model})


def chat_on_terminal(assistant: Assistant) -> None:
    """Chat on standard input and output."""
    chat(assistant, sys.stdin, sys.stdout)
