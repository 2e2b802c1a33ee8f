"""Whether objects are valid for a version of Kubernetes, strictly: an unknown key is an error."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from kubernetes_validate.utils import all_versions, schema_contents
from referencing import Registry, Resource

Object = dict[str, Any]

VERSIONS = tuple(f"1.{minor}" for minor in range(29, 35))


def problems(one: Object, version: str) -> list[str]:
    """What is wrong with this object; the kind must be one of Kubernetes' own."""
    validator = _validator(one["kind"], one["apiVersion"], version)
    name = f"{one['kind']} {one['metadata'].get('name')}"
    return [
        f"{version} {name} {error.json_path}: {error.message}"
        for error in validator.iter_errors(one)
    ]


def is_known(one: Object) -> bool:
    """Whether the object's kind is Kubernetes' own, and not a custom one."""
    group = one["apiVersion"].rpartition("/")[0]
    return "." not in group or (group.endswith(".k8s.io") and not group.startswith("kueue."))


@cache
def _validator(kind: str, api_version: str, version: str) -> Draft202012Validator:
    # The package's own `validate` reads a megabyte of definitions again for each object.
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    group, _, last = api_version.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], last)))
    return Draft202012Validator(
        schema_contents(f"{folder}/{name}.json", version), registry=_definitions(folder, version)
    )


@cache
def _definitions(folder: str, version: str) -> Registry[Any]:
    contents = schema_contents(f"{folder}/_definitions.json", version)
    return Resource.from_contents(contents) @ Registry()


def as_objects(pods: dict[str, Object]) -> Iterator[Object]:
    """Pods, or templates of pods, as whole objects."""
    for place, pod in pods.items():
        metadata = {"name": place.replace(" ", "-"), **pod["metadata"]}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}


assert {f"{version}.0" for version in VERSIONS} <= set(all_versions())
