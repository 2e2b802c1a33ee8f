"""Tokenise examples with the tokenizer of a model's folder, and find the tokens that are learnt."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from trainyard_trainer.data.sources.chats.answers import Answers
from trainyard_trainer.data.sources.chats.examples import (
    ChatExample,
    Example,
    Message,
    PromptExample,
    TextExample,
    WrongRow,
)
from trainyard_trainer.data.sources.chats.tool_calls import with_known_calls
from trainyard_trainer.data.sources.tokens.tokenizer_folder import load_tokenizer, padding_of
from trainyard_trainer.errors import ConfigError

MARK = re.compile(r"{%-?\s*generation\s*-?%}")
"""The beginning of the block by which a chat template marks the assistant's words."""


class Tokens(NamedTuple):
    """The tokens of an example."""

    ids: Sequence[int]
    is_learnt: Sequence[int]
    """1 for each token that is learnt, else 0."""


class ChatTokenizer:
    """Makes tokens of examples, as Transformers' tokenizer and its chat template say."""

    def __init__(self, folder: str, loss_on: Literal["answers", "all"]) -> None:
        """Load the tokenizer. Raises ConfigError if the folder has none that works."""
        # One row at a time needs no threads of the tokenizer's own.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._tokenizer = load_tokenizer(folder)
        # It cuts nothing here, and only causes a warning for longer rows.
        self._tokenizer.model_max_length = 2**62
        self._folder = folder
        self._loss_on = loss_on
        self._end: str = self._tokenizer.eos_token or ""
        added = self._tokenizer.added_tokens_decoder.values()
        self._special = [each.content for each in added if each.special]

    @property
    def vocab_size(self) -> int:
        """One more than the highest id of a token."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @property
    def pad_id(self) -> int:
        """The token that fills rows."""
        return padding_of(self._tokenizer)

    def tokens_of(self, example: Example) -> Tokens:
        """Return the tokens of an example. Raises WrongRow if the chat template fails, and ConfigError."""
        match example:
            case TextExample():
                ids = self._encode(example.text.removesuffix(self._end) + self._end)
                return Tokens(ids, [1] * len(ids))
            case PromptExample():
                return self._of_prompt(example)
            case ChatExample():
                return self._of_chat(example)

    def _of_prompt(self, example: PromptExample) -> Tokens:
        if isinstance(example.prompt, str) and isinstance(example.completion, str):
            before = self._encode(example.prompt)
            text = example.prompt + example.completion.removesuffix(self._end) + self._end
            whole = self._encode(text)
        else:
            messages: Any = [*example.prompt, *example.completion]
            messages = self._with_known_calls(messages, example.tools)
            prompt = messages[: len(example.prompt)]
            before = self._ids(self._render(prompt, example.tools, add_generation_prompt=True))
            whole = self._ids(self._render(messages, example.tools))
        shared = 0
        if self._loss_on == "answers":
            pairs = zip(before, whole)  # noqa: B905 - they differ in length
            different = (place for place, (a, b) in enumerate(pairs) if a != b)
            shared = next(different, min(len(before), len(whole)))
        return Tokens(whole, [0] * shared + [1] * (len(whole) - shared))

    def _of_chat(self, example: ChatExample) -> Tokens:
        tools = example.tools
        messages = self._with_known_calls(example.messages, tools)
        if self._loss_on == "all":
            ids = self._ids(self._render(messages, tools))
            return Tokens(ids, [1] * len(ids))
        self._require_places()
        if MARK.search(self._template(tools)):
            encoded = self._apply(
                messages, tools, return_dict=True, return_assistant_tokens_mask=True
            )
            return Tokens(encoded["input_ids"], encoded["assistant_masks"])
        return self._by_places(messages, tools)

    def _by_places(self, messages: list[Message], tools: list[Any] | None) -> Tokens:
        """Learn the tokens of the answers that are found in the rendered chat."""

        def render(part: Sequence[Message], **options: Any) -> str:
            return self._render([*part], tools, **options)

        whole, answers = Answers(render, self._special).places(messages)
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        places: np.ndarray = np.asarray(encoded.offset_mapping, np.int64).reshape(-1, 2)
        first, last = places[:, 0], places[:, 1]
        is_learnt = np.zeros(len(places), bool)
        for answer in answers:
            is_learnt |= (first >= answer.first) & (first < last) & (last <= answer.last)
        return Tokens(encoded.input_ids, is_learnt.astype(int).tolist())

    def _require_places(self) -> None:
        """Raise ConfigError if the tokenizer does not tell which characters a token stands for."""
        if not self._tokenizer.is_fast:
            raise ConfigError(
                f"train.model.path = {self._folder}: its tokenizer does not tell the place of a token in the "
                "text, so the answers of chats cannot be found.\n       Add a tokenizer.json, or use "
                "train.loss_on: all."
            )

    def _with_known_calls(self, messages: list[Message], tools: list[Any] | None) -> list[Message]:
        """Return the messages with calls of tools as the template knows them. Raises WrongRow."""
        return with_known_calls(messages, lambda form: self._render(form, tools))

    def _render(self, messages: list[Message], tools: list[Any] | None, **options: Any) -> str:
        text: str = self._apply(messages, tools, tokenize=False, **options)
        return text

    def _apply(self, messages: list[Message], tools: list[Any] | None, **options: Any) -> Any:
        """Apply the chat template. What goes wrong in it is the row's fault, or the template's."""
        self._template(tools)
        try:
            return self._tokenizer.apply_chat_template(messages, tools=tools, **options)
        except Exception as error:  # a template is a program of others
            raise WrongRow(f"the chat template fails: {type(error).__name__}: {error}") from error

    def _template(self, tools: list[Any] | None) -> str:
        """Return the chat template; a tokenizer may have another one for chats with tools."""
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"train.model.path = {self._folder}: its tokenizer has no chat template, and the data are "
                "chats.\n       Put one into the folder (chat_template.jinja), or use data with prompt and "
                "completion, or text."
            )
        try:
            return str(self._tokenizer.get_chat_template(tools=tools))
        except ValueError as error:
            raise ConfigError(
                f"train.model.path = {self._folder}: its tokenizer has several chat templates, and none of "
                "them is named default."
            ) from error

    def _ids(self, text: str) -> list[int]:
        """Return the tokens of a rendered chat, in which the template has put the special tokens."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text).input_ids
        return ids
