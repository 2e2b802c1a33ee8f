"""Plan -> job: the RayJob of `manifests/`, without the pods' shape and without a name."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, NoReturn, cast

import yaml
from jinja2 import Environment, StrictUndefined, TemplateError

from trainyard.errors import ConfigError
from trainyard.planning.plan import Plan

TEMPLATE = "rayjob.yaml.j2"


def render_job(plan: Plan, template: str | None = None) -> dict[str, Any]:
    """The RayJob that the template makes of a plan, parsed.

    Raises ConfigError if the template names a variable that no plan has, or makes no YAML.
    """
    text = template or (files("trainyard") / TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(undefined=StrictUndefined, autoescape=False)
    environment.policies["json.dumps_kwargs"] = {"default": _refuse}
    try:
        return cast(dict[str, Any], yaml.safe_load(environment.from_string(text).render(plan=plan)))
    except (TemplateError, yaml.YAMLError) as error:
        raise ConfigError(f"manifests/{TEMPLATE} cannot be rendered", str(error)) from error


def _refuse(value: object) -> NoReturn:
    """Called for what JSON cannot hold; the text of an undefined variable raises its own error."""
    raise TypeError(f"{value} is no JSON value")
