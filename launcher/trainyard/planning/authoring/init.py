"""Write a new run file for `trainyard init`: each key with its meaning, and defaults as comments."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from math import ceil, lcm
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainyard.errors import ConfigError
from trainyard.planning.plan import plan_run
from trainyard.planning.requirements import is_on_this_machine
from trainyard.planning.trainer_input import trainer_config
from trainyard.platform import Platform
from trainyard.run_file.models import RecipeRun
from trainyard.run_file.validation import section_of, validate
from trainyard.run_file.yaml_text import StrictDumper, parse_mapping
from trainyard_trainer.config.scaling import Scaling
from trainyard_trainer.config.storage import Storage

BATCH = 64
"""The smallest global batch, in samples, that `default_batch` chooses."""

LARGE = 10**6
"""The number of samples from which a global batch is too large to be a useful default."""

WIDTH = 100
"""The width of the comments in a run file, in characters."""
HEADING = """\
# A run file of trainyard. A key that is commented out shows its default value.
#   trainyard train FILE     trains the run on this machine
#   trainyard plan FILE      shows the pods, GPUs and memory that the run needs on a cluster
#   trainyard submit FILE    trains the run on a cluster
# `trainyard schema run > run.schema.json` writes a JSON Schema, with which an editor completes and checks
# this file.
"""


def default_batch(amount: Any, unit: Literal["gpus", "workers"], platform: Platform) -> int:
    """Return the smallest global batch of at least BATCH samples that all sizes of a run divide equally."""
    if isinstance(amount, dict):
        defaults = platform.default_pools
        pool = platform.pool(defaults.gpus if unit == "gpus" else defaults.workers)
        sizes = range(amount["min"], amount["max"] + 1, pool.slots)
    else:
        sizes = range(amount, amount + 1) if isinstance(amount, int) else range(1, 2)
    multiple = lcm(*sizes) if sizes and sizes[0] > 0 else LARGE
    if multiple >= LARGE:
        return (
            BATCH  # The sizes are not valid, or have no useful common batch: planning reports why.
        )
    return multiple * ceil(BATCH / multiple)


FIRST = ("name", "image", "resources", "data", "train", "checkpoint", "recipe", "strategy", "model")
"""Keys of a run file and of its sections that are written before the others."""


def run_text(answers: Mapping[str, Any]) -> str:
    """Return the text of a run file. `answers` has the chosen keys, nested as in a run file."""
    return HEADING + "\n" + "\n\n".join(_section(RecipeRun, answers, "")) + "\n"


def check_text(text: str, source: str, platform: Platform) -> RecipeRun:
    """Parse the text of a run file and plan the run. Raises ConfigError if one of the two is impossible.

    A run with data on this machine is not planned for a cluster: only its trainer config is built.
    """
    run = validate(RecipeRun, parse_mapping(text, source), source)
    if is_on_this_machine(run.data.source):
        scaling = Scaling(num_workers=run.resources.bounds[0], use_gpu=False, cpus_per_worker=1)
        trainer_config(run, scaling, Storage(path="runs"))
    else:
        plan_run(run, platform, "trainyard")
    return run


def existing_file(path: Path) -> ConfigError:
    """Return the error for a file that a new one would replace."""
    return ConfigError(
        f"{path} exists already and is not overwritten", "Choose another file name, or delete it."
    )


def write_run(path: Path, text: str) -> None:
    """Write a new run file. Raises ConfigError if the file exists already, or cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise existing_file(path) from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def _section(model: type[BaseModel], answers: Mapping[str, Any], indent: str) -> list[str]:
    """Return the text of each key of a section; a key without an answer is commented out."""
    fields = model.model_fields
    order = [name for name in FIRST if name in fields] + [
        name for name in fields if name not in FIRST
    ]
    return [_key(name, fields[name], answers.get(name), indent) for name in order]


def _key(name: str, field: FieldInfo, answer: Any, indent: str) -> str:
    """Return the lines of one key: its meaning as a comment, then its value or its default."""
    meaning = " ".join((field.description or "").split())
    lines = textwrap.wrap(
        meaning, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ",
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip
    model = section_of(field.annotation, answer)
    if answer is None:
        lines.append(f"{indent}# {name}: {_flow(field.get_default(call_default_factory=True))}")
    elif model is not None:
        lines += [f"{indent}{name}:", *_section(model, answer, f"{indent}  ")]
    else:
        lines.append(f"{indent}{name}: {_flow(answer)}")
    return "\n".join(lines)


def _flow(value: Any) -> str:
    """Return a value as one line of YAML in flow style."""
    plain = value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
    text = yaml.dump(
        [plain], Dumper=StrictDumper, default_flow_style=True, sort_keys=False, width=10**9
    )
    return text.strip()[1:-1]
