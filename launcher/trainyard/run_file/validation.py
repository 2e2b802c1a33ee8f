"""Validate a document with a model, and turn pydantic's errors into lines that a user can act on."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Collection, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from trainyard.errors import ConfigError
from trainyard.run_file.models import LIST, NAME, NUMBER, RANGE
from trainyard.run_file.values import how_to_quote
from trainyard.run_file.yaml_text import StrictDumper
from trainyard_trainer.config.trainer_config import RUN_NAME_LIMIT, RunName
from trainyard_trainer.config.training.recipes import RECIPES, recipe_named

M = TypeVar("M", bound=BaseModel)

WRONG_KEY = "[key]"
"""The step of a location by which pydantic says that the key before it is wrong, not its value."""

SHOWN_CHARACTERS = 100
"""Error messages show at most this many characters of a wrong value."""


def validate(model: type[M], document: dict[str, Any], source: str) -> M:
    """Return the document as an instance of the model.

    Raises ConfigError with all problems at once: path, value, rule, and the nearest valid key.
    """
    try:
        return model.model_validate(document)
    except ValidationError as error:
        problems = [_describe_problem(model, detail) for detail in error.errors()]
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError(f"{source} has {count}", *problems) from error


def check_name(name: object, what: str) -> str:
    """Return the name if it is a valid name of a run. Raises ConfigError whose message begins with `what`."""
    try:
        return TypeAdapter(RunName).validate_python(name)
    except ValidationError as error:
        raise ConfigError(f"{what} = {shown_value(name)}: {_name_rule(name)}") from error


def shown_value(value: object) -> str:
    """Return a value for an error message: in one line, with at most `SHOWN_CHARACTERS` characters."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def section_of(annotation: Any, value: Any) -> type[BaseModel] | None:
    """Return the model of a field that is a section, or None for a field with a plain value.

    If the field is a union of recipes, the recipe that the value names selects the model.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    named = recipe_named(value)
    return next((model for model in _models_in(annotation) if _tag_of(model) == named), None)


def unknown_key(path: str, key: str, known: Collection[str]) -> str:
    """Say that there is no key at this path, and which one is meant or which there are."""
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    return f"{path}: unknown key; {hint}"


def _describe_problem(model: type[BaseModel], detail: ErrorDetails) -> str:
    """Describe a problem in one line: path, value, rule, and the nearest valid key if there is one."""
    location, sections = _path_and_sections(model, detail["loc"])
    path = ".".join(location)
    value = shown_value(detail["input"])
    if detail["type"] in ("extra_forbidden", "invalid_key"):
        known = sorted({field for section in sections for field in _keys_of(section)})
        return unknown_key(path, location[-1], known)
    if detail["type"] == "missing":
        return f"{path}: is required"
    if detail["loc"] == ("name",):
        return f"name = {value}: {_name_rule(detail['input'])}"
    if detail["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"{path} = {value}: must be a mapping"
    if detail["type"] == "one_of":
        return f"{path}: {detail['msg']}" if path else detail["msg"]
    if detail["type"] == "union_tag_not_found":
        return f"{path}.name: is required"
    if detail["type"] == "union_tag_invalid":
        context = detail["ctx"]
        if context["discriminator"] != "'name'":
            choices = f"one of {', '.join(map(repr, RECIPES))}, or module:Class of your own"
            return f"{path}.recipe = {context['tag']!r}: must be {choices}"
        return f"{path}.name = {context['tag']!r}: must be one of {context['expected_tags']}"
    if detail["type"] == "string_type" and isinstance(detail["input"], bool | int | float):
        return f"{path} = {value}: must be text, and {how_to_quote(detail['input'])}"
    if detail["type"] in ("tuple_type", "list_type"):
        example = f": write {_as_list(detail['input'])}" if isinstance(detail["input"], str) else ""
        return f"{path} = {value}: must be a list{example}"
    if detail["type"] == "too_short":
        least = detail["ctx"]["min_length"]
        return f"{path} = {value}: must have at least {least} {'item' if least == 1 else 'items'}"
    rule = detail["msg"].replace("Input should be", "must be")
    return f"{path} = {value}: {rule[0].lower()}{rule[1:]}"


def _as_list(text: str) -> str:
    """Return the list that a text in one line seems to mean: `[python, t.py, --epochs, "3"]`."""
    try:
        words = shlex.split(text)
    except ValueError:  # quotes without an end
        words = text.split()
    dumped = yaml.dump(words, Dumper=StrictDumper, default_flow_style=True, width=10**9)
    return dumped.strip().replace("'", '"') if "'" not in text else dumped.strip()


def _name_rule(name: object) -> str:
    length = f" ({len(name)} characters)" if isinstance(name, str) else ""
    return (
        f"must be at most {RUN_NAME_LIMIT} characters, lower case letters, digits and dashes, "
        f"beginning with a letter and not ending with a dash{length}"
    )


def _keys_of(section: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()]


def _path_and_sections(
    model: type[BaseModel], location: Sequence[int | str]
) -> tuple[list[str], list[type[BaseModel]]]:
    """Return the path as the user wrote it, and the models of the section that holds the path's last key.

    Pydantic's location also contains the tags of unions, which the path leaves out.
    """
    path: list[str] = []
    here: list[type[BaseModel]] = [model]
    parents = here
    is_key = False  # of a mapping with free keys, such as the names of variables
    for step in location:
        tagged = [member for member in here if _tag_of(member) == step]
        if tagged:
            parents = here = tagged
            continue
        if step in (LIST, NAME, NUMBER, RANGE, WRONG_KEY):
            continue
        path.append(str(step))
        parents = here
        if is_key:
            is_key = False
            continue
        annotations = [
            field.annotation
            for section in here
            for name, field in section.model_fields.items()
            if step in (name, field.alias)
        ]
        is_key = any(get_origin(annotation) is dict for annotation in annotations)
        here = [inner for annotation in annotations for inner in _models_in(annotation)] or (
            [*here] if isinstance(step, int) else []
        )
    return path, parents


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated, tuple, list, dict):
        return [found for part in get_args(annotation) for found in _models_in(part)]
    return []


def _tag_of(model: type[BaseModel]) -> str | None:
    """Return the value of a model's `recipe` or `name: Literal[...]`, the discriminator of its union."""
    field = model.model_fields.get("recipe") or model.model_fields.get("name")
    if field is None or get_origin(field.annotation) is not Literal:
        return None
    tag = get_args(field.annotation)[0]
    return tag if isinstance(tag, str) else None
