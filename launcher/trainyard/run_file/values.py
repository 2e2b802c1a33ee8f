"""Refuse values of a run file that cannot reach the run as they are written.

A run's config travels as JSON. JSON has no dates and no bytes, and its keys are text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import date
from typing import Any

from trainyard.errors import ConfigError

TRUTH_WORDS = "yes, no, on, off, true and false"


def refuse_untransportable(document: Any, source: str) -> None:
    """Raise ConfigError with the path of every value and key that JSON cannot represent."""
    problems = [f"{path}: {problem}" for path, problem in _problems(document, "")]
    if problems:
        count = "1 value" if len(problems) == 1 else f"{len(problems)} values"
        raise ConfigError(f"{source} has {count} that cannot travel with a run", *problems)


def how_to_quote(value: Any) -> str:
    """Say how YAML reads a value that should have been text, and how to write it."""
    if isinstance(value, bool):
        word = "yes" if value else "no"
        return f'YAML reads {TRUTH_WORDS} as a truth value: quote it, such as "{word}"'
    return f'YAML reads it as a number: quote it, "{value}"'


def _problems(node: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for key, value in node.items():
            below = f"{path}.{key}".lstrip(".")
            if not isinstance(key, str):
                yield below, f"the key must be text, and {_kind_of_key(key)}"
            yield from _problems(value, below)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _problems(value, f"{path}.{index}".lstrip("."))
    elif isinstance(node, float) and math.isnan(node):
        yield (
            path,
            "is not a number (nan), so a run could not be compared with itself: leave it out",
        )
    elif isinstance(node, str) and not _is_unicode(node):
        yield path, "has half of a surrogate pair, which is no character: remove it"
    elif not (node is None or isinstance(node, str | bool | int | float)):
        kind = f"is a {type(node).__name__}, which JSON cannot represent"
        if isinstance(node, date):  # a datetime is a date, too
            yield path, f'{kind}: quote it, "{node.isoformat()}"'
        else:
            yield path, f"{kind}: use text, numbers, lists and mappings"


def _kind_of_key(key: Any) -> str:
    if key is None:
        return 'YAML reads null and ~ as nothing: quote it, such as "null":'
    if isinstance(key, bool):
        word = "on" if key else "off"
        return f'YAML reads {TRUTH_WORDS} as a truth value: quote it, such as "{word}":'
    kind = "number" if isinstance(key, int | float) else type(key).__name__
    return f'YAML reads it as a {kind}: quote it, "{key}":'


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
