"""JSON Schemas of run files and platform files, for completion and checks in editors.

They describe single keys: name, type and meaning. Rules between keys are checked when the file is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel
from typing_extensions import assert_never

from trainyard.platform import Platform
from trainyard.run_file.models import RUN_MODELS

Kind = Literal["run", "platform"]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
TITLES: dict[Kind, str] = {
    "run": "A run file of trainyard",
    "platform": "A platform file of trainyard: what the chart publishes",
}


def schema_of(kind: Kind) -> dict[str, Any]:
    """Return the JSON Schema of a run file or of a platform file."""
    match kind:
        case "run":
            schema = _either(*RUN_MODELS.values())
            _exactly_one(schema["$defs"]["Resources"], "gpus", "workers")
        case "platform":
            schema = _plain(Platform)
        case _:
            assert_never(kind)
    return {"$schema": DRAFT, **schema, "title": TITLES[kind]}


def _plain(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON Schema of one model."""
    schema: dict[str, Any] = _walked(model.model_json_schema(by_alias=True), _tidy)
    return schema


def _either(*models: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of a file that one of several models describes.

    It has the keys of all models, and one case per model with the keys that belong together.
    """
    schemas = [_plain(model) for model in models]
    together: dict[str, Any] = {**schemas[0], "properties": {}, "$defs": {}, "required": []}
    del together["description"]
    shapes: dict[str, list[Any]] = {}
    for schema in schemas:
        together["$defs"] |= schema["$defs"]
        for key, shape in schema["properties"].items():
            shapes.setdefault(key, [])
            shapes[key] += [shape] if shape not in shapes[key] else []
    together["properties"] = {
        key: found[0]
        if len(found) == 1
        else {"description": found[0]["description"], "anyOf": found}
        for key, found in shapes.items()
    }
    together["oneOf"] = [
        {
            "required": schema["required"],
            "properties": {
                key: schema["properties"].get(key, False)
                for key, found in shapes.items()
                if key not in schema["properties"] or len(found) > 1
            },
        }
        for schema in schemas
    ]
    together["required"] = sorted(set.intersection(*(set(each["required"]) for each in schemas)))
    return together


def _exactly_one(section: dict[str, Any], *keys: str) -> None:
    """Add to the schema of a section that exactly one of some keys has a value."""
    section["oneOf"] = [
        {"required": [key], "properties": {key: {"not": {"type": "null"}}}} for key in keys
    ]


def _walked(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Apply a function to each mapping of a schema, the inner ones first, and return the new schema."""
    if isinstance(schema, list):
        return [_walked(one, change) for one in schema]
    if isinstance(schema, dict):
        return change({key: _walked(value, change) for key, value in schema.items()})
    return schema


def _tidy(schema: dict[str, Any]) -> dict[str, Any]:
    """Write a description in one line, and remove the title, which only repeats a key."""
    if isinstance(schema.get("title"), str):
        del schema["title"]
    if isinstance(schema.get("description"), str):
        schema["description"] = " ".join(schema["description"].split())
    # `discriminator` is a keyword of OpenAPI. JSON Schema recognises a case by its constant name.
    schema.pop("discriminator", None)
    return schema
