"""Calls of tools in the forms that chat templates know.

Data have the arguments of a call as an object, or as text, as the API of OpenAI returns it. Templates take
either, or only one of them, and some render calls only where the content of the turn is null.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainyard_trainer.data.sources.chats.examples import Message, WrongRow

NOT_SHOWN = (
    "the chat template does not show the calls of tools. Put one that does into the model's folder "
    "(chat_template.jinja)"
)


def has_calls(messages: Sequence[Message]) -> bool:
    """Return whether a turn calls tools."""
    return any(message.get("tool_calls") for message in messages)


def with_known_calls(
    messages: list[Message], render: Callable[[list[Message]], str]
) -> list[Message]:
    """Return the messages with their calls in the first form that the template renders.

    Raises WrongRow if it fails with each of them, or shows none.
    """
    if not has_calls(messages):
        return messages
    try:
        without = render([_without_calls(each) for each in messages])
    except WrongRow:  # such as for an answer of a tool without a call
        without = None
    reasons: list[WrongRow] = []
    for form in _forms(messages):
        try:
            if render(form) != without:
                return form
            reasons.insert(0, WrongRow(NOT_SHOWN))
        except WrongRow as error:
            reasons.append(error)
    raise reasons[0]


def _forms(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield the messages with arguments as objects and as text, and with empty content and null."""
    for write in (_as_object, _as_text):
        for empty in ("", None):
            yield [_with_form(message, write, empty) for message in messages]


def _with_form(message: Message, write: Callable[[Any], Any], empty: str | None) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [
        call | {"function": _written(call["function"], write)}
        if isinstance(call.get("function"), dict)
        else _written(call, write)
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls, "content": message["content"] or empty}


def _written(function: dict[str, Any], write: Callable[[Any], Any]) -> dict[str, Any]:
    if "arguments" not in function:
        return function
    return function | {"arguments": write(function["arguments"])}


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        found = json.loads(arguments)
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _without_calls(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "tool_calls"}
