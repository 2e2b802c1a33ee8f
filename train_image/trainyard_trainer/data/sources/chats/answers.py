"""Find the answers in a chat that a chat template has rendered.

Most templates render the beginning of a chat as they render it in the whole chat. Then an answer is what is
added with the assistant's turn. Others, such as those of reasoning models, leave out the thoughts of earlier
turns, or show tools with the last question alone. There, an answer is found by a mark behind its words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from trainyard_trainer.data.sources.chats.examples import Message, WrongRow

BEGIN, END = "\ue0f1", "\ue0f2"
"""Characters for private use. They mark a place in a chat, and templates treat them as letters."""


class Place(NamedTuple):
    """The first character of an answer, and the one behind it."""

    first: int
    last: int


class Answers:
    """The places of the assistant's turns in a rendered chat."""

    def __init__(self, render: Callable[..., str], special: Sequence[str]) -> None:
        """`render` applies the template to messages; `special` are the special tokens of the tokenizer."""
        self._render = render
        # The longest first, since a token may begin with another one.
        self._special = sorted(special, key=len, reverse=True)
        self._pieces = re.compile("|".join([*map(re.escape, self._special), "\n"]))

    def places(self, messages: Sequence[Message]) -> tuple[str, list[Place]]:
        """Return the rendered chat and the places of its answers. Raises WrongRow if they cannot be found."""
        whole = self._render(messages)
        found: list[Place] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            place = self._by_prefix(whole, messages, number)
            if place is None:
                start = found[-1].last if found else 0
                place = self._by_mark(whole, messages, number, start)
            if place is None:
                raise WrongRow(
                    f"the chat template renders the first {number + 1} messages in another way than in the "
                    "whole chat, and the answer cannot be found in it. Mark the answers in the template with "
                    "{% generation %}, or use train.loss_on: all"
                )
            _require_words(message, whole[place.first : place.last], number)
            found.append(place)
        return whole, found

    def _by_prefix(self, whole: str, messages: Sequence[Message], number: int) -> Place | None:
        """Return what the template adds with the turn, without white space behind it."""
        before = self._render(messages[:number], add_generation_prompt=True)
        after = self._render(messages[: number + 1])
        if not whole.startswith(after) or not after.startswith(before):
            return None
        return Place(len(before), len(after.rstrip()))

    def _by_mark(
        self, whole: str, messages: Sequence[Message], number: int, start: int
    ) -> Place | None:
        """Return the place around a mark behind the words of the turn, which is not before `start`."""
        marked = _marked(messages[number])
        text = self._render([*messages[:number], marked, *messages[number + 1 :]])
        alone = self._render([*messages[:number], marked])
        if text.replace(BEGIN, "").replace(END, "") != whole or text.count(END) != 1:
            return None  # the marks have changed more than themselves
        end = self._end_of(text.partition(END)[2], alone.partition(END)[2])
        prompt = self._prompt(messages[:number])
        if end is None:
            return None
        place = text.replace(BEGIN, "").index(END)
        if prompt:
            first = self._behind(prompt, whole, start, place)
        else:
            first = len(text.partition(BEGIN)[0].rstrip()) if BEGIN in text else None
        return None if first is None else Place(first, place + end)

    def _end_of(self, rest: str, last: str) -> int | None:
        """Return how much of `rest`, the chat behind the mark, belongs to the answer.

        `last` is what follows the mark if the answer ends the chat: the rest of calls, and what ends a turn.
        """
        last = last.rstrip()
        if rest.startswith(last):
            return len(last)
        # Some templates end the last turn by another token than those before.
        return next((len(token) for token in self._special if rest.startswith(token)), None)

    def _prompt(self, before: Sequence[Message]) -> str:
        """Return what the template adds so that the model answers.

        Without it, some templates add a token that ends the chat.
        """
        text = self._render(before)
        asked = self._render(before, add_generation_prompt=True)
        if not asked.startswith(text):
            shared = [size for size in self._ends(asked) if text.startswith(asked[:size])]
            return asked[max(shared, default=0) :]
        return asked[len(text) :]

    def _behind(self, prompt: str, whole: str, start: int, place: int) -> int | None:
        """Return the place behind the last occurrence of `prompt` between `start` and `place`.

        It may begin thoughts that earlier turns lack. Then its first lines or special tokens are looked for.
        """
        for size in sorted({*self._ends(prompt), len(prompt)}, reverse=True):
            found = whole.rfind(prompt[:size], start, place)
            if found >= 0:
                return found + size
        return None

    def _ends(self, text: str) -> list[int]:
        """Return the places behind lines and special tokens."""
        return [each.end() for each in self._pieces.finditer(text)]


def _require_words(message: Message, answer: str, number: int) -> None:
    """Raise WrongRow if the template has lost the words of a turn, such as one for lists of parts."""
    words = message["content"].split() if isinstance(message["content"], str) else []
    if words and words[-1] not in answer:
        raise WrongRow(
            f"the chat template does not show the content of message {number + 1}, which is text. It may be "
            "for content that is a list of parts, as models for images have it"
        )


def _marked(message: Message) -> Message:
    """Return the message with a mark behind the last letter of its words, or in its last call.

    Words have a mark before their first letter, too.
    """
    content, calls = message["content"], message.get("tool_calls")
    if isinstance(content, str) and (content.strip() or not calls):
        return message | {"content": _around(content)}
    if isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        return message | {
            "content": [*content[:-1], content[-1] | {"text": _around(content[-1]["text"])}]
        }
    if not calls:
        return message
    *others, last = calls
    function: dict[str, Any] = last.get("function", last)
    named = function | {"name": f"{function.get('name', '')}{END}"}
    return message | {
        "tool_calls": [*others, last | {"function": named} if "function" in last else named]
    }


def _around(words: str) -> str:
    """Put the marks inside the white space around words, which templates may remove."""
    bare = words.strip()
    first = words.find(bare)
    last = first + len(bare)
    return f"{words[:first]}{BEGIN}{bare}{END}{words[last:]}"
