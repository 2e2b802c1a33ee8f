"""Answers -> a run file that explains every key, and shows the default of those not given."""

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
from trainyard.run_file.yaml_text import parse_mapping
from trainyard_trainer.config.scaling import Scaling
from trainyard_trainer.config.storage import Storage

BATCH = 64
"""Samples per step at least, where nobody says how many."""

LARGE = 10**6

WIDTH = 100
HEADING = """\
# A run of trainyard. A key behind a `#` has the value that is shown there, until another is written.
#   trainyard train FILE     trains on this machine
#   trainyard plan FILE      says what a cluster has to have for it
#   trainyard submit FILE    trains there
# `trainyard schema run > run.schema.json` makes a schema by which an editor completes and checks this file.
"""


def default_batch(amount: Any, unit: Literal["gpus", "workers"], platform: Platform) -> int:
    """The smallest global batch of at least BATCH samples that all sizes of a run can share."""
    if isinstance(amount, dict):
        defaults = platform.default_pools
        pool = platform.pool(defaults.gpus if unit == "gpus" else defaults.workers)
        sizes = range(amount["min"], amount["max"] + 1, pool.slots)
    else:
        sizes = range(amount, amount + 1) if isinstance(amount, int) else range(1, 2)
    multiple = lcm(*sizes) if sizes and sizes[0] > 0 else LARGE
    if multiple >= LARGE:
        return BATCH  # no such run, or none with a batch that makes sense: planning it says why
    return multiple * ceil(BATCH / multiple)


FIRST = ("name", "image", "resources", "data", "train", "checkpoint", "recipe", "strategy", "model")
"""Keys of a run file and its sections that one reads before the others."""


def run_text(answers: Mapping[str, Any]) -> str:
    """The run file of some answers, which have the shape of a run file."""
    return HEADING + "\n" + "\n\n".join(_section(RecipeRun, answers, "")) + "\n"


def check_text(text: str, source: str, platform: Platform) -> RecipeRun:
    """The run of a text, if it loads and can be planned. Raises ConfigError."""
    run = validate(RecipeRun, parse_mapping(text, source), source)
    if is_on_this_machine(run.data.source):
        scaling = Scaling(num_workers=run.resources.bounds[0], use_gpu=False, cpus_per_worker=1)
        trainer_config(run, scaling, Storage(path="runs"))
    else:
        plan_run(run, platform, "trainyard")
    return run


def write_run(path: Path, text: str) -> None:
    """Raises ConfigError rather than to overwrite anything."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already and is not overwritten", "Name another file, or remove it."
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def _section(model: type[BaseModel], answers: Mapping[str, Any], indent: str) -> list[str]:
    """Each key of a section with its meaning; those that nobody answered are comments."""
    fields = model.model_fields
    order = [name for name in FIRST if name in fields] + [
        name for name in fields if name not in FIRST
    ]
    return [_key(name, fields[name], answers.get(name), indent) for name in order]


def _key(name: str, field: FieldInfo, answer: Any, indent: str) -> str:
    meaning = " ".join((field.description or "").split())
    lines = textwrap.wrap(
        meaning, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ",
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip
    model = section_of(field.annotation, answer)
    if answer is None:
        lines.append(f"{indent}# {name}: {_flow(field.get_default())}")
    elif model is not None:
        lines += [f"{indent}{name}:", *_section(model, answer, f"{indent}  ")]
    else:
        lines.append(f"{indent}{name}: {_flow(answer)}")
    return "\n".join(lines)


def _flow(value: Any) -> str:
    """A value in one line of YAML."""
    plain = value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
    text = yaml.safe_dump([plain], default_flow_style=True, sort_keys=False, width=10**9)
    return text.strip()[1:-1]
