"""The sections `command` and `function`: a run of the user's own code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

PLACEHOLDERS = ("workers", "gpus", "storage", "run", "attempt")
"""What a command's arguments may name in braces."""

_BRACES = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")


def _require_placeholders(command: tuple[str, ...]) -> tuple[str, ...]:
    """A misspelled name in braces would reach the program as it is."""
    for argument in command:
        for _, name in _BRACES.findall(argument):
            if name and name not in PLACEHOLDERS:
                raise PydanticCustomError(
                    "placeholder",
                    f"{{{name}}} is none of "
                    f"{', '.join(f'{{{known}}}' for known in PLACEHOLDERS)}; "
                    f"write {{{{{name}}}}} for the text {{{name}}}",
                )
    return command


Command = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(min_length=1, strict=False),
    AfterValidator(_require_placeholders),
]
"""A program and its arguments, without a shell."""

_REFERENCE = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"


def _require_reference(name: str) -> str:
    if re.match(_REFERENCE, name) is None:
        raise PydanticCustomError("reference", "must be module:name, such as my_module:MyClass")
    return name


Reference = Annotated[
    str, AfterValidator(_require_reference), Field(json_schema_extra={"pattern": _REFERENCE})
]
"""The name of a function or class of the user's code, as `module:name`."""

RunWith = Literal["torchrun"]
"""Programs that start a command once for each worker."""


def fill_command(command: tuple[str, ...], values: Mapping[str, str]) -> list[str]:
    """`--num-workers {workers}` -> `--num-workers 2`; `{{workers}}` -> `{workers}`."""

    def fill(found: re.Match[str]) -> str:
        return f"{{{found[1]}}}" if found[1] else values[found[2]]

    return [_BRACES.sub(fill, argument) for argument in command]
