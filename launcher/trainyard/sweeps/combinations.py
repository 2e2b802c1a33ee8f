"""Create the runs of a sweep from one run file: a run for each combination of values, with its own name."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.errors import ClusterError, ClusterUnreachable, ConfigError
from trainyard.run_file.load import load_run
from trainyard.run_file.models import RunConfig
from trainyard.run_file.overrides import parse_overrides
from trainyard.run_file.yaml_text import read_yaml
from trainyard_trainer.config.trainer_config import RUN_NAME_LIMIT

COMBINATION_LIMIT = 1000
"""The largest number of combinations of a sweep."""

HASH_DIGITS = 8
"""The number of hexadecimal digits of the hash in the name of a run."""

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
"""A pattern of numbers, including spellings that YAML reads as text, such as 1e-3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """One combination of values, and the run with these values."""

    settings: Mapping[str, str]
    """The value of each swept key, as typed."""
    run: RunConfig

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.run.name

    def __str__(self) -> str:
        return in_words(self.settings)


def in_words(settings: Mapping[str, str]) -> str:
    """Return values as text, such as `train.seed=1 train.epochs=3`."""
    return " ".join(f"{key}={value}" for key, value in settings.items())


def load_sweep(
    path: Path,
    words: Sequence[str],
    settings: Sequence[str] = (),
    *,
    gpus: str | None = None,
    workers: str | None = None,
    name: str | None = None,
) -> list[Combination]:
    """Load the run of each combination, as if its values were given by `--set`.

    Raises ConfigError that names the invalid combination.
    """
    swept = parse_words(words)
    sizes = [len(values) for values in swept.values()]
    if math.prod(sizes) > COMBINATION_LIMIT:
        raise ConfigError(
            f"{' x '.join(map(str, sizes))} = {math.prod(sizes)} combinations are more than "
            f"{COMBINATION_LIMIT}",
            "Sweep fewer values at once.",
        )
    read_yaml(path)  # reports an unreadable file without a combination
    combinations = []
    for values in itertools.product(*swept.values()):
        chosen = dict(zip(swept, values, strict=True))
        with naming(chosen):
            own = [*settings, *(f"{key}={value}" for key, value in chosen.items())]
            run = load_run(path, own, gpus=gpus, workers=workers, name=name)
            named = run.model_copy(update={"name": run_name(run.name, chosen)})
        combinations.append(Combination(settings=chosen, run=named))
    _refuse_equal(combinations)
    return combinations


def parse_words(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the values of each key from arguments such as `KEY=V1,V2`. Raises ConfigError."""
    swept: dict[str, tuple[str, ...]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word!r} must have the form KEY=V1,V2,... such as train.seed=1,2,3")
        if key == "name":
            raise ConfigError(
                "name cannot be swept: each run gets its own name",
                "Use --name to set the common prefix of the names.",
            )
        values = split_values(text)
        if key in swept:
            together = ",".join((*swept[key], *values))
            raise ConfigError(f"{key} is given twice", f"Use {key}={together}.")
        if "" in values:
            raise ConfigError(
                f"{word}: a value is empty",
                "Remove the comma, or use null for no value and '' for an empty string.",
            )
        swept[key] = values
    return swept


def split_values(text: str) -> tuple[str, ...]:
    """Split a text at commas outside of {}, [] and quotes: `1,{a: 2, b: 3}` has two values."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        before = values[-1]
        if quote:
            is_escaped = quote == '"' and before.endswith("\\")
            quote = "" if letter == quote and not is_escaped else quote
        elif letter in "'\"" and before.rstrip()[-1:] in ("", *"{[,:", letter):
            quote = letter
        elif letter in "{[":
            depth += 1
        elif letter in "}]":
            depth = max(depth - 1, 0)
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    return tuple(value.strip() for value in values)


def run_name(base: str, settings: Mapping[str, str]) -> str:
    """Return `<base>-<8 hex digits>`. The hash does not depend on the order and spelling of the values.

    A base that is too long is truncated.
    """
    spelled = sorted(
        f"{key}={json.dumps(_canonical(value), sort_keys=True, default=str)}"
        for keys, value in parse_overrides(f"{key}={text}" for key, text in settings.items())
        for key in (".".join(keys),)
    )
    suffix = "-" + hashlib.sha256("\n".join(spelled).encode()).hexdigest()[:HASH_DIGITS]
    return base[: RUN_NAME_LIMIT - len(suffix)].rstrip("-") + suffix


def _canonical(value: Any) -> Any:
    """Return a value in its canonical form, in which 0.10, .1 and 1e-1 are equal, and so are 2 and 2.0."""
    if isinstance(value, dict):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, str) and NUMBER.fullmatch(value):
        value = float(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _refuse_equal(combinations: Sequence[Combination]) -> None:
    """Raise ConfigError for two combinations with the same config or the same name."""
    seen: dict[str, Combination] = {}
    for combination in combinations:
        config = combination.run.model_dump(mode="json", exclude={"name"})
        for mark in (combination.name, json.dumps(config, sort_keys=True)):
            if mark in seen:
                raise ConfigError(
                    f"{seen[mark]} and {combination} are the same run", "Remove one of them."
                )
            seen[mark] = combination


@contextmanager
def naming(combination: Combination | Mapping[str, str]) -> Iterator[None]:
    """Prefix the message of an error inside the block with the combination."""
    words = in_words(combination) if isinstance(combination, Mapping) else str(combination)
    try:
        yield
    except ClusterUnreachable:
        raise
    except ConfigError as error:
        raise ConfigError(f"{words}: {error.what}", *error.details) from error
    except ClusterError as error:
        raise ClusterError(f"{words}: {error.what}", *error.details, reason=error.reason) from error
