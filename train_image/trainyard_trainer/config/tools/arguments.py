"""The types of a tool's arguments: kinds of values, arguments and tools."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard_trainer.config.location import (
    endpoint_problem,
    local_problem,
    location_problem,
    model_problem,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueKind:
    """A kind of value: how its text is read, and which values are accepted."""

    read: Callable[[str], Any]
    rule: str
    """The accepted values in words, as an error message names them."""
    accepts: Callable[[Any], bool] = lambda _: True
    problem: Callable[[str], str | None] = lambda _: None
    """Takes the text. Returns what is wrong with it, where `rule` alone would not say it."""

    def parse(self, text: str) -> Any:
        """Return the value of a text. Raises ValueError with a message for the user."""
        if (problem := self.problem(text)) is not None:
            raise ValueError(f"{text} {problem}")
        try:
            value = self.read(text)
            is_accepted = self.accepts(value)
        except ValueError:
            is_accepted = False
        if not is_accepted:
            raise ValueError(f"{text} is not {self.rule}")
        return value


TEXT = ValueKind(read=str, rule="a text")
LOCATION = ValueKind(read=str, rule="a path or s3://bucket/prefix", problem=location_problem)
MODEL = ValueKind(
    read=str, rule="a path, s3://bucket/prefix or hf://org/name", problem=model_problem
)
LOCAL = ValueKind(read=str, rule="a path of this machine", problem=local_problem)
ADDRESS = ValueKind(read=str, rule="an address", problem=endpoint_problem)
COUNT = ValueKind(read=int, rule="a whole number of at least 0", accepts=lambda value: value >= 0)
AT_LEAST_THREE = ValueKind(
    read=int, rule="a whole number of at least 3", accepts=lambda value: value >= 3
)
VOCABULARY = ValueKind(
    read=int,
    rule="a whole number from 258 (256 bytes and 2 special tokens) to 1,000,000",
    accepts=lambda value: 258 <= value <= 1_000_000,
)
POSITIVE = ValueKind(
    read=int, rule="a whole number of at least 1", accepts=lambda value: value >= 1
)
AT_LEAST_TWO = ValueKind(
    read=int, rule="a whole number of at least 2", accepts=lambda value: value >= 2
)
NOT_NEGATIVE = ValueKind(
    read=float, rule="a number of at least 0", accepts=lambda value: 0 <= value < math.inf
)
SHARE = ValueKind(read=float, rule="a number between 0 and 1", accepts=lambda value: 0 < value < 1)


def one_of(*choices: str | int) -> ValueKind:
    """Return the kind of value that is one of these texts or whole numbers."""
    kind = type(choices[0])
    return ValueKind(
        read=kind,
        rule=f"one of {', '.join(map(str, choices))}",
        accepts=lambda value: value in choices,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One argument of a tool: an option if its name begins with `--`, else a positional argument."""

    name: str
    help: str
    metavar: str = ""
    """The name that help texts show for the value."""
    kind: ValueKind | None = TEXT
    """The kind of the value; None for a flag, which has no value."""
    default: Any = None
    """The value of an argument that was not given. A flag that was not given is False."""
    default_text: str | None = None
    """The default as help texts describe it, where it is not a constant."""
    is_required: bool = False
    is_repeated: bool = False
    """Whether a positional argument takes any number of values."""

    @property
    def key(self) -> str:
        """The argument's name as a Python identifier."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def is_option(self) -> bool:
        """Whether it is an option, and not a positional argument."""
        return self.name.startswith("--")

    @property
    def full_help(self) -> str:
        """The help text, with the default at its end."""
        default = self.default_text or self.default
        return self.help if default is None else f"{self.help}  [default: {default}]"


def _without_problem(given: Mapping[str, Any]) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """One command of a tool: `python -m trainyard_trainer.tools.<module> [<command>] ARGUMENT...`."""

    module: str
    command: str | None = None
    help: str
    """What the command does, in a sentence."""
    arguments: tuple[Argument, ...]
    problem: Callable[[Mapping[str, Any]], str | None] = _without_problem
    """Takes the given arguments by key. Returns what is wrong with their combination, or None."""


def option_of(key: str) -> str:
    """Return the option that gives a key, such as `--text-files`."""
    return f"--{key.replace('_', '-')}"
