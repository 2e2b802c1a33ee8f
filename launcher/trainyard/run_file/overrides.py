"""Changes to a run file from the command line: `--set a.b=c`, `--gpus` and `--workers`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from trainyard.errors import ConfigError
from trainyard.run_file.yaml_text import parse_value


def parse_overrides(settings: Iterable[str]) -> list[tuple[list[str], Any]]:
    """Parse `--set` options: `a.b=c` -> (["a", "b"], c), where the value is read as YAML.

    Raises ConfigError for an option without a key or a `=`, and for a value that is not valid YAML.
    """
    parsed = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"--set {setting} must have the form --set section.key=value")
        try:
            parsed.append((key.split("."), parse_value(text)))
        except yaml.YAMLError as error:
            raise ConfigError(
                f"--set {setting}: the value is not valid YAML", *str(error).splitlines()[:1]
            ) from error
    return parsed


def parse_amount(text: str) -> int | str | dict[str, int]:
    """Parse `--gpus` or `--workers`: `16` -> 16, and `8:16` -> {"min": 8, "max": 16}.

    Any other text is returned unchanged, so that validation reports it with its path.
    """
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    if found := re.fullmatch(r"(-?[0-9]{1,18}):(-?[0-9]{1,18})", text):
        return {"min": int(found[1]), "max": int(found[2])}
    return text


def assign(document: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set a value in a nested mapping, and create the sections on its path.

    Raises ConfigError if the path leads through a value that is not a mapping.
    """
    section: Any = document
    for depth, key in enumerate(keys[:-1], start=1):
        if section.get(key) is None:  # the key is absent, or has no value
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            raise ConfigError(
                f"{'.'.join(keys)} cannot be set: {'.'.join(keys[:depth])} is a value, not a section"
            )
    section[keys[-1]] = value
