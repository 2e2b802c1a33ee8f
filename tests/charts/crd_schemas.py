"""JSON schemas for kubeconform, made from what the pinned Go modules hold.

KubeRay's and the Prometheus operator's come from the CRDs in their modules; those of Kubernetes' own
kinds, where that module is there too, from its OpenAPI description. All are made strict: a key that
a schema does not know is an error, as it is for `kubectl`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

PINS = (
    *Path(__file__).resolve().parents[1].glob("cluster/tools/*/go.mod"),
    Path(__file__).parent / "crds" / "go.mod",
)

FILE_NAME = "{{.ResourceKind}}-{{.Group}}-{{.ResourceAPIVersion}}.json"
"""How kubeconform finds a schema; for core kinds the group is `v1`."""

OPERATOR = "github.com/ray-project/kuberay/ray-operator"
PROMETHEUS = "github.com/prometheus-operator/prometheus-operator"

KUBERNETES_APIS = ("api__v1", "apis__rbac.authorization.k8s.io__v1")


def module_folder(module: str) -> Path | None:
    """A Go module in the module cache, at the version that the tests are pinned to."""
    go = shutil.which("go")
    name = re.escape(module)
    pin = re.compile(rf"^\s*{name} (?:=> {name} )?(v\S+)", re.MULTILINE)
    pinned = [found[1] for go_mod in PINS if (found := pin.search(go_mod.read_text()))]
    if go is None or not pinned:
        return None
    cache = subprocess.run([go, "env", "GOMODCACHE"], capture_output=True, text=True, check=True)
    folder = Path(cache.stdout.strip(), f"{module}@{pinned[0]}")
    return folder if folder.is_dir() else None


def write_ray_schemas(operator: Path, target: Path) -> list[str]:
    """Write a file per kind and version of KubeRay; the kinds."""
    return _write_crds(operator / "config/crd/bases", target)


def write_prometheus_schemas(operator: Path, target: Path) -> list[str]:
    """Write a file per kind of the Prometheus operator that our chart makes; the kinds."""
    folder = operator / "example/prometheus-operator-crd"
    return [
        kind
        for name in ("podmonitors", "prometheusrules")
        for kind in _write_crds(folder, target, f"*_{name}.yaml")
    ]


def _write_crds(folder: Path, target: Path, names: str = "*.yaml") -> list[str]:
    kinds = []
    for crd in sorted(folder.glob(names)):
        spec = yaml.load(crd.read_text(), yaml.CSafeLoader)["spec"]
        kind, group = spec["names"]["kind"], spec["group"]
        for version in spec["versions"]:
            schema = version["schema"]["openAPIV3Schema"]
            # The API server supplies what a CRD leaves open about these.
            schema["properties"]["metadata"] = {"type": "object"}
            path = target / f"{kind.lower()}-{group}-{version['name']}.json"
            path.write_text(json.dumps(strict(schema)))
        kinds.append(kind)
    return kinds


def write_kubernetes_schemas(kubernetes: Path, target: Path) -> list[str]:
    """Write a file per kind of Kubernetes that a chart may hold; the kinds."""
    kinds = []
    for api in KUBERNETES_APIS:
        path = kubernetes / "api/openapi-spec/v3" / f"{api}_openapi.json"
        components = strict({"schemas": json.loads(path.read_text())["components"]["schemas"]})
        for name, schema in components["schemas"].items():
            for known in schema.get("x-kubernetes-group-version-kind", []):
                if known["version"] != "v1" or known["kind"].endswith(("List", "Options")):
                    continue
                group = known["group"] or "v1"
                whole = {"$ref": f"#/components/schemas/{name}", "components": components}
                file = target / f"{known['kind'].lower()}-{group}-v1.json"
                file.write_text(json.dumps(whole))
                kinds.append(known["kind"])
    return kinds


def strict(node: Any) -> Any:
    """The same schema, closed wherever it lists properties and does not ask to be left open."""
    if isinstance(node, list):
        return [strict(one) for one in node]
    if not isinstance(node, dict):
        return node
    closed = {key: strict(value) for key, value in node.items()}
    if closed.pop("x-kubernetes-int-or-string", False):
        closed.pop("type", None)
    is_object = isinstance(node.get("properties"), dict) and node.get("type") == "object"
    if is_object and not node.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed
