"""The schema that `trainyard check` validates objects with: the pinned CRDs, as compact as they can be.

`make golden` writes it into the package. Sub-schemas that occur several times, such as the template of a
pod, are stored once in `$defs`. Texts are left out.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

KINDS = ("rayclusters", "rayjobs")
DROPPED = {
    "description",
    "title",
    "x-kubernetes-map-type",
    "x-kubernetes-validations",
    "anyOf",
    "nullable",
}
"""Keywords without a use here: `anyOf` only repeats `x-kubernetes-int-or-string`, and the API server drops
a null before it validates an object."""
SHARED_LENGTH = 120
"""Sub-schemas with at least this many characters are stored once."""
INT32, INT64 = 2**31, 2**63
OBJECT_META: dict[str, Any] = yaml.safe_load("""
type: object
additionalProperties: false
properties:
  name: {type: string}
  generateName: {type: string}
  namespace: {type: string}
  uid: {type: string}
  resourceVersion: {type: string}
  selfLink: {type: string}
  creationTimestamp: {type: string}
  deletionTimestamp: {type: string}
  generation: {type: integer}
  deletionGracePeriodSeconds: {type: integer}
  labels: {type: object, additionalProperties: {type: string}}
  annotations: {type: object, additionalProperties: {type: string}}
  finalizers: {type: array, items: {type: string}}
  managedFields: {type: array, items: {type: object}}
  ownerReferences:
    type: array
    items:
      type: object
      additionalProperties: false
      required: [apiVersion, kind, name, uid]
      properties:
        apiVersion: {type: string}
        kind: {type: string}
        name: {type: string}
        uid: {type: string}
        controller: {type: boolean}
        blockOwnerDeletion: {type: boolean}
""")
"""What the API server itself knows of `metadata`, which CRDs leave open."""


def kuberay_schema(operator: Path) -> str:
    """Return the schema of the operator's RayCluster and RayJob as JSON, by kind and version."""
    schemas: dict[str, Any] = {}
    for name in KINDS:
        text = (operator / f"config/crd/bases/ray.io_{name}.yaml").read_text()
        spec = yaml.load(text, yaml.CSafeLoader)["spec"]
        for version in spec["versions"]:
            schema = _compact(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = OBJECT_META
            schemas[f"{spec['names']['kind']}/{version['name']}"] = schema
    counts: Counter[str] = Counter()
    _count(schemas, counts)
    definitions: dict[str, Any] = {}
    shared = {kind: _share(schema, counts, definitions) for kind, schema in schemas.items()}
    document = {"kinds": shared, "$defs": dict(sorted(definitions.items()))}
    return json.dumps(document, separators=(",", ":"), sort_keys=True) + "\n"


def _compact(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema in the words of JSON Schema, closed where the API server prunes unknown fields."""
    compact = {key: value for key, value in schema.items() if key not in DROPPED}
    is_open = compact.pop("x-kubernetes-preserve-unknown-fields", False)
    if compact.pop("x-kubernetes-int-or-string", False):
        compact |= {"type": ["integer", "string"], "minimum": -INT64, "maximum": INT64 - 1}
    if (size := {"int32": INT32, "int64": INT64}.get(compact.pop("format", ""))) is not None:
        compact = {"minimum": -size, "maximum": size - 1} | compact
    if "properties" in compact:
        fields = schema["properties"]
        compact["properties"] = {key: _compact(value) for key, value in fields.items()}
        # The API server sets defaults before it looks for what is required.
        required = [key for key in compact.get("required", []) if "default" not in fields[key]]
        compact["required"] = required
    if isinstance(compact.get("additionalProperties"), dict):
        compact["additionalProperties"] = _compact(compact["additionalProperties"])
    if "items" in compact:
        compact["items"] = _compact(compact["items"])
    if compact.get("type") == "object" and not is_open:
        compact.setdefault("additionalProperties", False)
    return compact


def _text(node: Any) -> str:
    return json.dumps(node, separators=(",", ":"), sort_keys=True)


def _count(node: Any, counts: Counter[str]) -> None:
    if isinstance(node, dict):
        counts[_text(node)] += 1
        for value in node.values():
            _count(value, counts)


def _share(node: Any, counts: Counter[str], definitions: dict[str, Any]) -> Any:
    """Return a schema whose repeated parts are references to `$defs`, which this function fills."""
    if not isinstance(node, dict):
        return node
    text = _text(node)
    shared = {key: _share(value, counts, definitions) for key, value in node.items()}
    is_schema = isinstance(node.get("type"), str | list)
    if not is_schema or counts[text] < 2 or len(text) < SHARED_LENGTH:
        return shared
    name = hashlib.sha256(text.encode()).hexdigest()[:8]
    definitions[name] = shared
    return {"$ref": f"#/$defs/{name}"}
