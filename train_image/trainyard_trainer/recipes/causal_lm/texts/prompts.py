"""Prompts as tokens, and tokens as text, by the tokenizer of a model's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainyard_trainer.data.prepared import PromptAs
from trainyard_trainer.data.sources.chats.examples import Question, WrongRow
from trainyard_trainer.data.sources.chats.tool_calls import with_known_calls
from trainyard_trainer.data.sources.tokens.tokenizer_folder import load_tokenizer, padding_of
from trainyard_trainer.errors import ConfigError

TEXTS = "texts"
"""The key of validation.json with what the model has written behind the prompts of the run file."""

Message = Mapping[str, str]
"""A turn of a chat: its `role` and its `content`."""


class Prompts:
    """Turns prompts and chats into tokens that a model continues."""

    def __init__(self, path: str, prompt_as: PromptAs | None = None) -> None:
        """Load the tokenizer of a model's folder. Raises ConfigError if there is none.

        `prompt_as` tells what a prompt is: a user's turn of a chat, or a text that the model continues. None
        stands for a turn if there is a chat template.
        """
        self._tokenizer = load_tokenizer(path)
        # It cuts nothing here, and only causes a warning for longer prompts.
        self._tokenizer.model_max_length = 2**62
        ends = [self._tokenizer.eos_token_id]
        found = _settings_of_generation(path).get("eos_token_id")
        ends += found if isinstance(found, list) else [found]
        self.ends = frozenset(token for token in ends if token is not None)
        """The tokens that end a text."""
        self.padding = padding_of(self._tokenizer)
        """The token that fills rows of a batch."""
        self.prompt_as: PromptAs = prompt_as or ("chat" if self.has_template else "text")
        """What a prompt that is text stands for."""
        if self.prompt_as == "chat" and not self.has_template:
            raise ConfigError(
                f"prompts are turns of a chat, and the tokenizer of {path} has no chat template.\n"
                "       Use --prompt-as text, or a folder of the model with a chat template."
            )

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self._tokenizer.chat_template is not None

    def of_question(self, question: Question) -> list[int]:
        """Return the tokens of a question. Raises WrongRow if it has none, or if the template refuses it."""
        tokens = self._encode(*self._render(question))
        if not tokens:
            raise WrongRow("it has no token")
        return tokens

    def of_choice(self, question: Question, choice: str) -> tuple[list[int], int]:
        """Return the tokens of a question with a choice behind it, and the number of those before the choice.

        Raises WrongRow if the choice has no token of its own.
        """
        text, is_rendered = self._render(question)
        before, whole = self._encode(text, is_rendered), self._encode(text + choice, is_rendered)
        pairs = zip(before, whole)  # noqa: B905 - they differ in length
        different = (place for place, (a, b) in enumerate(pairs) if a != b)
        shared = next(different, min(len(before), len(whole)))
        if not 0 < shared < len(whole):
            raise WrongRow(f"the choice {choice!r} has no token behind those of the prompt")
        return whole, shared

    def _render(self, question: Question) -> tuple[str, bool]:
        """Return a question as text, and whether the chat template has rendered it. Raises WrongRow."""
        prompt = question.prompt
        if isinstance(prompt, str):
            if self.prompt_as == "text":
                return prompt, False
            prompt = [{"role": "user", "content": prompt}]
        if not self.has_template:
            raise WrongRow("it is a chat, and the model's tokenizer has no chat template")
        tools = question.tools
        messages = with_known_calls(prompt, lambda form: self._render_chat(form, tools))
        return self._render_chat(messages, tools), True

    def _render_chat(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        """Return a chat behind which the model answers. Raises WrongRow if the template fails."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template is a program of others
            raise WrongRow(f"the chat template fails: {type(error).__name__}: {error}") from error
        return text

    def _encode(self, text: str, is_rendered: bool) -> list[int]:
        """Return the tokens of a text; a rendered one has its special tokens already."""
        tokens: list[int] = self._tokenizer(text, add_special_tokens=not is_rendered).input_ids
        return tokens

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return tokens as text, without special tokens."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def _settings_of_generation(path: str) -> Mapping[str, Any]:
    """Return the content of generation_config.json, if there is one. Raises ConfigError if it is damaged."""
    file = Path(path, "generation_config.json")
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}. Copy the file again.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file} has no settings. Copy the file again.")
    return found


@lru_cache(maxsize=1)
def prompts_of(path: str, prompt_as: PromptAs | None) -> Prompts:
    """Return the tokenizer of a model's folder, which takes a second to load."""
    return Prompts(path, prompt_as)
