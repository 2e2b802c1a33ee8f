"""Read YAML strictly: mappings with unique keys, and errors that name the file and the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from trainyard.errors import ConfigError


class StrictLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A YAML loader that refuses duplicate keys. PyYAML itself keeps the last value without a message."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key, (key_node, _) in zip(keys, node.value, strict=True):
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key}", key_node.start_mark
                )
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ConfigError that names the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return parse_mapping(text, str(path))


def read_documents(path: Path) -> list[Any]:
    """Return the documents of a YAML file, with the items of a Kubernetes List as separate documents.

    The path `-` is standard input. Raises ConfigError that names the file and the line.
    """
    file = Path("/dev/stdin") if path == Path("-") else path
    try:
        documents = list(yaml.load_all(file.read_text(encoding="utf-8"), Loader=StrictLoader))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path} is not valid YAML", *str(error).splitlines()) from error
    single = []
    for document in documents:
        items = document.get("items") if isinstance(document, dict) else None
        single += items if isinstance(items, list) else [document]
    return single


def parse_mapping(text: str, source: str) -> dict[str, Any]:
    """Return the mapping in a YAML text. Raises ConfigError that names the source and the line."""
    try:
        document = parse_value(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML", *str(error).splitlines()) from error
    if not isinstance(document, dict):
        found = "nothing" if document is None else type(document).__name__
        raise ConfigError(f"{source} must hold a mapping, not {found}")
    return document


def parse_value(text: str) -> Any:
    """Return the value of a YAML text.

    Raises YAMLError, also for values such as the date 2001-99-99, for which PyYAML raises ValueError.
    """
    try:
        return yaml.load(text, Loader=StrictLoader)
    except ValueError as error:
        raise yaml.YAMLError(str(error)) from error
