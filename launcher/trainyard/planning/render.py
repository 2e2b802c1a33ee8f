"""Render `manifests/rayjob.yaml.j2`: a plan becomes a RayJob without name and pod templates."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NoReturn

import yaml
from jinja2 import Environment, StrictUndefined, TemplateError

from trainyard.errors import ConfigError
from trainyard.planning.plan import Plan

TEMPLATE = "rayjob.yaml.j2"


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedTemplate:
    """The two YAML documents of the template, parsed."""

    job: dict[str, Any]
    """The RayJob without `metadata.name` and `spec.rayClusterSpec`."""
    pod_metadata: dict[str, dict[str, str]]
    """Labels and annotations of every pod: `labels` and `annotations`, each optional."""


def render_job(plan: Plan, template: str | None = None) -> RenderedTemplate:
    """Render the template, or the given text of one, with the numbers of a plan and parse the
    result.

    Raises ConfigError if the template uses an unknown variable, or if its result is not the two
    expected documents.
    """
    text = template or (files("trainyard") / TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(undefined=StrictUndefined, autoescape=False)
    environment.policies["json.dumps_function"] = _json_for_yaml
    environment.policies["json.dumps_kwargs"] = {"default": _refuse}
    try:
        rendered = environment.from_string(text).render(plan=plan)
        documents = list(yaml.safe_load_all(rendered))
    except (TemplateError, yaml.YAMLError) as error:
        raise ConfigError(f"manifests/{TEMPLATE} cannot be rendered", str(error)) from error
    match documents:
        case [{"podMetadata": dict(pod_metadata), **rest}, {"kind": "RayJob"} as job] if not rest:
            if pod_metadata.keys() <= {"labels", "annotations"}:
                return RenderedTemplate(job=job, pod_metadata=pod_metadata)
    raise ConfigError(
        f"manifests/{TEMPLATE} must hold two YAML documents",
        "The first is podMetadata with labels and annotations of all pods, the second is the RayJob.",
    )


JSON_ESCAPE = re.compile(r"\\(?:u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})|.)")
"""An escape sequence of JSON; its groups are the two halves of a character above U+FFFF."""


def _json_for_yaml(value: object, **options: Any) -> str:
    """Return a value as JSON that is valid YAML: YAML has no pairs of escapes for characters above U+FFFF."""

    def joined(escape: re.Match[str]) -> str:
        if escape[1] is None:
            return escape[0]
        character = json.loads(f'"{escape[0]}"')
        return f"\\U{ord(character):08X}"

    return JSON_ESCAPE.sub(joined, json.dumps(value, **options))


def _refuse(value: object) -> NoReturn:
    """Raise TypeError for a value that JSON cannot represent. An undefined variable raises an error
    of its own."""
    raise TypeError(f"{value} is no JSON value")
