"""Read YAML strictly: mappings with unique keys, and errors that name the file and the line."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

from trainyard.errors import ConfigError

DEPTH_LIMIT = 100
"""The largest number of mappings and lists that may be nested in a document."""

TIMESTAMP = "tag:yaml.org,2002:timestamp"
VALUE, MERGE = "tag:yaml.org,2002:value", "tag:yaml.org,2002:merge"
"""The types of the texts `=` and `<<` in YAML 1.1."""


class StrictLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A YAML loader whose numbers are those of YAML 1.2, and that refuses duplicate keys.

    PyYAML itself reads 1e-4 as text and 12:30 as the number 750, and of duplicate keys it keeps the last.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key, (key_node, _) in zip(keys, node.value, strict=True):
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key}", key_node.start_mark
                )
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


class KubernetesLoader(StrictLoader):
    """A YAML loader for manifests and values of Helm: as for kubectl and Helm, dates and 1e400 are text."""


FLOAT, INT = "tag:yaml.org,2002:float", "tag:yaml.org,2002:int"
NUMBERS = {
    FLOAT: re.compile(
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
        r"|[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
    ),
    INT: re.compile(r"[-+]?(?:0b[01_]+|0o[0-7_]+|[0-9][0-9_]*|0x[0-9a-fA-F_]+)$"),
}


def _resolve_numbers(loader: type[StrictLoader], dropped: tuple[str, ...]) -> None:
    """Give a loader the numbers of YAML 1.2, and let it read values of the dropped types as text."""
    dropped = (*dropped, *NUMBERS)
    loader.yaml_implicit_resolvers = {
        first: [(tag, rule) for tag, rule in rules if tag not in dropped]
        for first, rules in loader.yaml_implicit_resolvers.items()
    }
    for tag, rule in NUMBERS.items():
        loader.add_implicit_resolver(tag, rule, list("-+.0123456789"))


def _construct_int(loader: StrictLoader, node: yaml.ScalarNode) -> int:
    """Refuse 010, which is 8 in YAML 1.1 and 10 in YAML 1.2."""
    text = loader.construct_scalar(node)
    if re.fullmatch(r"[-+]?0[0-9_]+", text):
        raise yaml.constructor.ConstructorError(
            None,
            None,
            f"{text} begins with 0: quote it if it is text, or write the number without the 0",
            node.start_mark,
        )
    return int(text.replace("_", ""), 0)


def _construct_float(loader: StrictLoader, node: yaml.ScalarNode) -> float:
    """Refuse a number that no float can hold, such as 1e400 or 1e-400."""
    text = loader.construct_scalar(node)
    number = float(loader.construct_yaml_float(node))
    is_too_small = number == 0 and re.match(r"[-+.0_]*[1-9]", text)
    if is_too_small or (math.isinf(number) and "inf" not in text.lower()):
        size = "small" if is_too_small else "large"
        raise yaml.constructor.ConstructorError(
            None, None, f"{text} is too {size} for a number", node.start_mark
        )
    return number


def _construct_float_or_text(loader: StrictLoader, node: yaml.ScalarNode) -> float | str:
    """Read a number that no float can hold as text, as kubectl and Helm do."""
    try:
        return _construct_float(loader, node)
    except yaml.constructor.ConstructorError:
        return str(loader.construct_scalar(node))


def _construct_octal(loader: StrictLoader, node: yaml.ScalarNode) -> int:
    """Read 010 as kubectl does: as 8; and 08 as 8, too."""
    text = loader.construct_scalar(node).replace("_", "")
    if re.fullmatch(r"[-+]?0[0-7]+", text):
        return int(text, 8)
    return int(text) if re.fullmatch(r"[-+]?[0-9]+", text) else int(text, 0)


_resolve_numbers(StrictLoader, (VALUE,))
_resolve_numbers(KubernetesLoader, (VALUE, TIMESTAMP))
StrictLoader.add_constructor(MERGE, StrictLoader.construct_yaml_str)
StrictLoader.add_constructor(INT, _construct_int)
StrictLoader.add_constructor(FLOAT, _construct_float)
KubernetesLoader.add_constructor(INT, _construct_octal)
KubernetesLoader.add_constructor(FLOAT, _construct_float_or_text)


class StrictDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """A YAML dumper that quotes each text that this or another version of YAML reads as something else."""


for tag, rule in NUMBERS.items():
    StrictDumper.add_implicit_resolver(tag, rule, list("-+.0123456789"))


def read_yaml(path: Path, *, of_helm: bool = False) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ConfigError that names the file and the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return parse_mapping(text, str(path), of_helm=of_helm)


def read_documents(path: Path) -> list[Any]:
    """Return the documents of a YAML file, with the items of a Kubernetes List as separate documents.

    The path `-` is standard input. Raises ConfigError that names the file and the line.
    """
    file = Path("/dev/stdin") if path == Path("-") else path
    try:
        documents = list(yaml.load_all(file.read_text(encoding="utf-8"), Loader=KubernetesLoader))
        _require_depth(documents)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML", *str(error).splitlines()) from error
    single = []
    for document in documents:
        items = document.get("items") if isinstance(document, dict) else None
        single += items if isinstance(items, list) else [document]
    return single


def parse_mapping(text: str, source: str, *, of_helm: bool = False) -> dict[str, Any]:
    """Return the mapping in a YAML text. Raises ConfigError that names the source and the line."""
    try:
        document = parse_value(text, of_helm=of_helm)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML", *str(error).splitlines()) from error
    if not isinstance(document, dict):
        found = "nothing" if document is None else type(document).__name__
        raise ConfigError(f"{source} must hold a mapping, not {found}")
    return document


def parse_value(text: str, *, of_helm: bool = False) -> Any:
    """Return the value of a YAML text; `of_helm` if Helm has written it, so that its rules hold.

    Raises YAMLError, also for values such as the date 2001-99-99, for which PyYAML raises ValueError.
    """
    try:
        load = _load_of_helm if of_helm else _load
        value = load(text)
    except (ValueError, RecursionError) as error:
        raise yaml.YAMLError(str(error)) from error
    _require_depth(value)
    return value


def _load(text: str) -> Any:
    return yaml.load(text, Loader=StrictLoader)


def _load_of_helm(text: str) -> Any:
    return yaml.load(text, Loader=KubernetesLoader)


def _require_depth(node: Any, levels: int = DEPTH_LIMIT) -> None:
    """Raise YAMLError for mappings and lists that are nested too deep, also without end by an alias."""
    if isinstance(node, dict | list):
        if not levels:
            raise yaml.YAMLError(
                f"mappings and lists are nested more than {DEPTH_LIMIT} levels deep, or an alias leads to "
                "one that contains it"
            )
        for each in node.values() if isinstance(node, dict) else node:
            _require_depth(each, levels - 1)
