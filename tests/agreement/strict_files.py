"""JSON and YAML parsers that refuse a key that occurs twice in a mapping."""

from __future__ import annotations

import json
from typing import Any

import yaml


class DuplicateKeyError(ValueError):
    """A key occurs twice in a mapping, so that one of its values would be lost."""


def strict_json(text: str) -> Any:
    """Parse a JSON document. Raises DuplicateKeyError, or ValueError for NaN, Infinity and invalid JSON."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)


def strict_yaml(text: str) -> list[Any]:
    """Parse all documents of a YAML text. Raises DuplicateKeyError, or YAMLError if the text is invalid."""
    return list(yaml.load_all(text, StrictLoader))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise DuplicateKeyError(f"key {key!r} occurs twice")
        found[key] = value
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


class StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which itself keeps only the last value of a key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                raise DuplicateKeyError(f"key {key!r} occurs twice: {key_node.start_mark}")
            keys.add(key)
        return super().construct_mapping(node, deep)
