"""Rules of the OpenAPI schema of KubeRay's CRDs, which the API server enforces: types, unknown fields,
quantities, ranges, and unique keys of list items.

The schema in `kuberay_schema.json` is that of KubeRay 1.6 without its CEL rules, which are functions in
`trainyard.rules.api_server`. Fields that were added in KubeRay 1.7 have no schema here, and their contents
are not checked.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import jsonschema
from jsonschema.exceptions import ValidationError

from trainyard.rules.field_path import FieldPath, Violation
from trainyard.rules.subject import Subject

TYPES = {
    "string": "a string",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
}
INT32_BOUNDS, INT64_BOUND = (-(2**31), 2**31 - 1), 2**63
"""The API server itself does not check that an int32 has 32 bits, only that it has 64."""
PROTOCOL = ("protocol", "TCP")
"""The one key of a list whose default the API server fills in before it compares items."""


def fits_the_schema(subject: Subject) -> Iterator[Violation]:
    version = subject.root.at("apiVersion")
    kind = subject.root.at("kind")
    known = sorted(_document()["kinds"])
    versions = [name.partition("/")[2] for name in known if name.startswith(f"{kind.text}/")]
    group, _, name = version.text.partition("/")
    if group != "ray.io" or name not in versions:
        choices = " or ".join(f"ray.io/{one}" for one in reversed(versions))
        yield version.breaks("schema", f"is not an API version of {kind.text}", f"Use {choices}.")
        return
    for error in _validator(f"{kind.text}/{name}").iter_errors(subject.document):
        # The API server clears the status of a new object after it has looked for unknown fields.
        is_status = "status" in list(error.absolute_path)[:1]
        if not is_status or error.validator == "additionalProperties":
            yield from _violations(error, subject)


@cache
def _document() -> dict[str, Any]:
    text = (files("trainyard") / "kuberay_schema.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


@cache
def _validator(kind: str) -> Any:
    """Return a validator that supports `x-kubernetes-list-map-keys`."""
    keywords = ("properties", "additionalProperties", "required")
    extended = jsonschema.validators.extend(
        jsonschema.Draft202012Validator,
        {"x-kubernetes-list-map-keys": _has_unique_items}
        | {keyword: _without_nulls(keyword) for keyword in keywords},
    )
    document = _document()
    return extended({**document["kinds"][kind], "$defs": document["$defs"]})


def _without_nulls(keyword: str) -> Any:
    """Return a JSON Schema keyword that ignores keys with the value null, as the API server does."""
    original = jsonschema.Draft202012Validator.VALIDATORS[keyword]

    def validate(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if isinstance(instance, dict) and value is not False:
            instance = {key: item for key, item in instance.items() if item is not None}
        yield from original(validator, value, instance, schema) or ()

    return validate


def _has_unique_items(
    _: Any, keys: list[str], items: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    """Refuse a list that has two items with the same values of its keys."""
    if not isinstance(items, list):
        return
    names = [
        tuple(str(item.get(key, dict([PROTOCOL]).get(key))) for key in keys)
        for item in items
        if isinstance(item, dict)
    ]
    for name, count in Counter(names).items():
        if count > 1:
            shown = ", ".join(f"{key} {value}" for key, value in zip(keys, name, strict=True))
            yield ValidationError(f"has {count} items with {shown}")


def _violations(error: ValidationError, subject: Subject) -> Iterator[Violation]:
    """Yield the violations for an error of the JSON Schema validator."""
    place = _place(subject.root, list(error.absolute_path))
    rule, expected = error.validator, error.validator_value
    if rule == "additionalProperties":
        fields = error.schema.get("properties", {})
        for key in sorted(set(error.instance) - set(fields), key=str):
            unknown = place.at(str(key))
            if not _came_later(unknown, subject):
                near = difflib.get_close_matches(str(key), fields, n=1)
                yield unknown.breaks(
                    "unknown-field",
                    "is not a field: strict validation refuses it, and otherwise it is ignored",
                    f"Did you mean {near[0]}?" if near else f"Fields: {', '.join(sorted(fields))}.",
                )
    elif rule == "required":
        for key in expected:
            is_optional = subject.kuberay == "1.7" and key == "redisAddress"
            if error.instance.get(key) is None and not is_optional:
                yield place.at(key).breaks("required", "is required", "Set it.")
    elif rule == "type":
        yield place.breaks("type", *_type_problem(place.value, expected))
    elif rule == "enum":
        yield place.breaks(
            "choice", "is not a valid value", f"Use one of {', '.join(map(str, expected))}."
        )
    elif rule == "pattern" and error.schema.get("type") == ["integer", "string"]:
        yield place.breaks(
            "quantity",
            "is not a quantity",
            "Write a number with Ki, Mi, Gi, k, M, G or m: 500m, 4Gi.",
        )
    elif rule == "x-kubernetes-list-map-keys":
        yield place.breaks("repeated-item", error.message, "Keep one of them.")
    elif (
        rule in ("minimum", "maximum")
        and expected in INT32_BOUNDS
        and abs(error.instance) < INT64_BOUND
    ):
        yield place.breaks(
            "overflow", "exceeds 32 bits: the operator cannot read it", "Use a smaller number."
        )
    else:
        yield place.breaks("range", f"must satisfy {rule}: {expected}", "Change the value.")


def _place(root: FieldPath, path: list[str | int]) -> FieldPath:
    """Return the field at a path of keys and indexes."""
    here = root
    for step in path:
        if isinstance(step, int) and isinstance(here.value, list):
            here = FieldPath(f"{here.path}[{step}]", here.value[step])
        else:
            here = here.at(str(step))
    return here


def _came_later(place: FieldPath, subject: Subject) -> bool:
    """Return whether a field was added in KubeRay 1.7; `has_the_fields_of_its_release` checks those."""
    return any(place.path == later.path for later in subject.places_new_in_1_7)


def _type_problem(value: Any, expected: str | list[str]) -> tuple[str, str]:
    """Return what is wrong with the type of a value, and the remedy."""
    wanted = [expected] if isinstance(expected, str) else expected
    problem = f"must be {' or '.join(TYPES[one] for one in wanted)}"
    if value is None:
        return f"{problem}, but has no value", "Set a value, or remove the key."
    if isinstance(value, dict | list):
        return problem, "Change its type."
    if "string" in wanted:
        return f"{problem}: quote it", f'Write "{_as_written(value)}".'
    if wanted == ["integer"] and isinstance(value, str) and value.lstrip("-").isdecimal():
        return f"{problem}, without quotes", f"Write {value}."
    return problem, "Change its type."


def _as_written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


RULES = (fits_the_schema,)
