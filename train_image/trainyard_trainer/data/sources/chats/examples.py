"""Recognise the layout of a row: a chat, a prompt with its completion, or a text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
"""A turn of a chat: `role` and `content`, and what else the chat template knows."""

ROLES: Mapping[str, str] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""The roles of ShareGPT, and those of chat templates that they stand for."""

LAYOUTS: tuple[tuple[str, ...], ...] = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("text",),
)
"""The keys by which a layout is recognised, in the order in which they are looked for."""

KEYS = ("messages", "tools", "conversations", "system", "prompt", "completion", "instruction") + (
    "input",
    "output",
    "text",
)
"""All keys of a row that are read."""


class WrongRow(Exception):
    """A row from which no example can be made; the message is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatExample:
    """A chat whose assistant's turns are answers."""

    messages: list[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptExample:
    """A prompt and its completion: both text, or both messages."""

    prompt: str | list[Message]
    completion: str | list[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TextExample:
    """A text, of which all tokens are learnt."""

    text: str


Example = ChatExample | PromptExample | TextExample


def is_chat(example: Example) -> bool:
    """Return whether a chat template renders the example."""
    return isinstance(example, ChatExample) or (
        isinstance(example, PromptExample) and isinstance(example.prompt, list)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a model is asked: a text, or a chat whose next turn is the assistant's."""

    prompt: str | list[Message]
    tools: list[Any] | None = None


def example_of(row: object) -> Example:
    """Return the example of a row. Raises WrongRow if it has no known layout, or a value of a wrong type.

    Keys without a value (null) are left out everywhere: Arrow adds them to the structs of all rows.
    """
    values = _values_of(row)
    layout = next((keys for keys in LAYOUTS if all(key in values for key in keys)), None)
    if layout is None:
        raise WrongRow(f"it has the keys {', '.join(map(str, values)) or 'none'}; {wanted_keys()}")
    match layout[0]:
        case "messages":
            return ChatExample(messages=_messages(values, "messages"), tools=_tools(values))
        case "conversations":
            return ChatExample(messages=_of_sharegpt(values), tools=_tools(values))
        case "prompt":
            return _prompt_of(values)
        case "instruction":
            return _of_alpaca(values)
        case _:
            return TextExample(text=_text(values, "text"))


def question_of(row: object) -> Question:
    """Return what a row asks: its `prompt`, or its `messages`, the last one not the assistant's.

    Raises WrongRow.
    """
    values = _values_of(row)
    key = next((key for key in ("messages", "prompt") if key in values), None)
    if key is None:
        raise WrongRow(
            f"it has the keys {', '.join(map(str, values)) or 'none'}; a row needs prompt, or messages"
        )
    if isinstance(values[key], str) and key == "prompt":
        return Question(prompt=values[key])
    if not isinstance(values[key], list) and key == "prompt":
        raise WrongRow(f"prompt is {_kind(values[key])}; it has to be text, or a list of messages")
    messages = _messages(values, key)
    if messages[-1]["role"] == "assistant":
        raise WrongRow(f"the last message of {key} is the assistant's, which leaves none to answer")
    return Question(prompt=messages, tools=_tools(values))


def _values_of(row: object) -> dict[str, Any]:
    """Return the values of a row without those that are null. Raises WrongRow if it is no row."""
    if not isinstance(row, Mapping):
        raise WrongRow(f"it is no object with keys, but {_kind(row)}")
    try:
        values: dict[str, Any] = without_nulls(row)
        json.dumps(values, ensure_ascii=False, default=str).encode()
    except RecursionError:
        raise WrongRow("its values are nested too deeply") from None
    except UnicodeEncodeError as error:
        raise WrongRow(
            f"it has {error.object[error.start]!a}, half of a character: write the whole one"
        ) from None
    return values


def wanted_keys() -> str:
    """Return the keys of all layouts in words, for messages."""
    return f"a row needs {', or '.join(' and '.join(keys) for keys in LAYOUTS)}"


def without_nulls(value: Any) -> Any:
    """Return a value of JSON without the keys of objects whose value is null, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value


def _prompt_of(values: Mapping[str, Any]) -> PromptExample:
    parts = values["prompt"], values["completion"]
    if all(isinstance(part, str) for part in parts):
        return PromptExample(prompt=parts[0], completion=parts[1])
    if all(isinstance(part, list) for part in parts):
        return PromptExample(
            prompt=_messages(values, "prompt"),
            completion=_messages(values, "completion"),
            tools=_tools(values),
        )
    raise WrongRow(
        f"prompt is {_kind(parts[0])} and completion {_kind(parts[1])}: both have to be text, or both lists "
        "of messages"
    )


def _of_alpaca(values: Mapping[str, Any]) -> ChatExample:
    question = _text(values, "instruction")
    if values.get("input"):
        question = f"{question}\n\n{_text(values, 'input')}"
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": _text(values, "output")},
    ]
    return ChatExample(messages=_with_system(values, messages))


def _of_sharegpt(values: Mapping[str, Any]) -> list[Message]:
    turns = _list(values, "conversations")
    if all("role" in turn for turn in turns):
        return _with_system(values, _messages(values, "conversations"))
    messages = []
    for number, turn in enumerate(turns, 1):
        name, content = turn.get("from"), turn.get("value")
        if name not in ROLES:
            raise WrongRow(
                f"turn {number} of conversations is from {name!r}; known are {', '.join(ROLES)}"
            )
        if not isinstance(content, str):
            raise WrongRow(f"value of turn {number} of conversations is {_kind(content)}, not text")
        messages.append({"role": ROLES[name], "content": content})
    return _with_system(values, messages)


def _with_system(values: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    if not values.get("system"):
        return messages
    return [{"role": "system", "content": _text(values, "system")}, *messages]


def _messages(values: Mapping[str, Any], key: str) -> list[Message]:
    messages = []
    for number, message in enumerate(_list(values, key), 1):
        if not isinstance(message.get("role"), str):
            raise WrongRow(
                f"message {number} of {key} has the keys {', '.join(map(str, message)) or 'none'}; it needs "
                "role and content"
            )
        made = {
            name: value for name, value in message.items() if (name, value) != ("tool_calls", [])
        }
        if "content" not in made:
            if "tool_calls" not in made:
                raise WrongRow(f"message {number} of {key}, from {made['role']}, has no content")
            # Templates join the content with other text, and some ask whether it is there at all.
            made["content"] = ""
        if not isinstance(made["content"], str | list):
            raise WrongRow(f"content of message {number} of {key} is {_kind(made['content'])}")
        messages.append(made)
    return messages


def _list(values: Mapping[str, Any], key: str) -> list[Any]:
    found = values[key]
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise WrongRow(f"{key} is {_kind(found)}; it has to be a list of objects")
    if not found:
        raise WrongRow(f"{key} is empty")
    return found


def _tools(values: Mapping[str, Any]) -> list[Any] | None:
    found = values.get("tools")
    if isinstance(found, str):
        try:
            found = json.loads(found) if found.strip() else None
        except ValueError as error:
            raise WrongRow(f"tools is text, and no JSON: {error}") from None
    if not found:
        return None
    if not isinstance(found, Sequence) or not all(isinstance(each, Mapping) for each in found):
        raise WrongRow(f"tools is {_kind(found)}; it has to be a list of objects")
    return list(found)


def _text(values: Mapping[str, Any], key: str) -> str:
    found = values[key]
    if not isinstance(found, str):
        raise WrongRow(f"{key} is {_kind(found)}, not text")
    return found


def _kind(value: object) -> str:
    names = {str: "text", list: "a list", dict: "an object", bool: "true or false"}
    if value is None:
        return "missing"
    return names.get(type(value), f"a value of type {type(value).__name__}")
