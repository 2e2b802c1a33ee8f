"""The values: explained, and closed against misspelling."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.charts.helm_chart import CHART, need_tool, refusal, render, run_helm

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = (CHART / "values.yaml").read_text()
# Maps whose keys the administrator chooses.
FREE_MAPS = {"annotations", "nodeSelector", "global", "labels", "nodes", "hard"}
FREE_MAPS |= {"default", "defaultRequest", "max", "min", "quantities", "env", "resources"}
FREE_MAPS |= {"patchedLabels"}


def resolve(node: dict[str, Any]) -> dict[str, Any]:
    name = node.get("$ref", "").removeprefix("#/definitions/")
    return SCHEMA["definitions"][name] if name else node


def fields(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each field of the schema below this node, by path; `*` is any key or item."""
    node = resolve(node)
    for key, field in node.get("properties", {}).items():
        yield f"{path}.{key}".lstrip("."), field
        yield from fields(field, f"{path}.{key}")
    for many in (node.get("items"), node.get("additionalProperties")):
        if isinstance(many, dict):
            yield from fields(many, f"{path}.*")


def keys(node: yaml.Node, path: str = "") -> Iterator[tuple[str, int]]:
    """Each key of values.yaml with its line, counted from 0."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = f"{path}.{key.value}".lstrip(".")
            yield below, key.start_mark.line
            if not getattr(value, "flow_style", True):
                yield from keys(value, below)


def pool_path(path: str) -> str:
    """The path as the schema has it: pools are told once, for all names."""
    return re.sub(r"^pools\.\w+\.", "pools.*.", path)


def test_every_field_has_a_description():
    described = {path: bool(field.get("description")) for path, field in fields(SCHEMA)}
    assert len(described) > 50
    assert [path for path, has in described.items() if not has] == []


def test_every_object_of_the_schema_is_closed():
    nodes = [("", SCHEMA), *fields(SCHEMA), *SCHEMA["definitions"].items()]
    open_ones = [
        path
        for path, node in nodes
        if "object" in resolve(node).get("type", "")
        and resolve(node).get("additionalProperties") is not False
        and path.split(".")[-1] not in FREE_MAPS | {"pools"}
        and path != "data.volumes"
        # Kubernetes' own structures are checked in the RayJob, by `trainyard render` and `submit`.
        and not (
            resolve(node)["additionalProperties"] is True
            and ("pod." in f"{path}." or path.startswith("data.volumes.*."))
        )
    ]
    assert open_ones == ["kubernetesMap"]


def test_every_key_has_a_comment_and_a_field():
    lines = VALUES.splitlines()
    found = list(keys(yaml.compose(VALUES)))
    explained = {
        pool_path(path) for path, line in found if lines[line - 1].lstrip().startswith("# ")
    }
    assert {pool_path(path) for path, _ in found} - explained == set()
    described = {path for path, _ in fields(SCHEMA)} | {"pools.gpu", "pools.cpu"}
    assert {pool_path(path) for path, _ in found} - described == set()


def comment_above(line: int) -> str:
    """The comment that ends in the line before this one, as one line of text."""
    lines = VALUES.splitlines()
    first = line
    while first and lines[first - 1].lstrip().startswith("# "):
        first -= 1
    return " ".join(text.strip().removeprefix("# ") for text in lines[first:line])


def test_comments_of_the_values_are_the_descriptions_of_the_schema():
    described = {path: field.get("description") for path, field in fields(SCHEMA)}
    commented = {path: comment_above(line) for path, line in keys(yaml.compose(VALUES))}
    differing = {
        path
        for path, comment in commented.items()
        if comment and described.get(pool_path(path), comment) != comment
    }
    assert len(commented) > 50
    assert differing == set()


def test_every_required_key_has_a_value():
    values = yaml.safe_load(VALUES)
    assert set(SCHEMA["required"]) == set(values)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "storage",
        "storage.claim",
        "storage.s3",
        "prePull",
        "operator",
        "queue",
        "queue.kueue",
        "priorityClasses.0",
        "quotas",
        "quotas.limitRange",
        "disruptionBudget",
        "elastic",
        "security",
        "security.namespace",
        "security.networkPolicy",
        "security.networkPolicy.egress.0",
        "monitoring",
        "monitoring.podMonitor",
        "monitoring.prometheusRule",
        "monitoring.dashboards",
        "test",
        "pools.gpu.network",
        "launcher.clusterRbac",
        "pools.gpu",
        "pools.gpu.tolerations.0",
        "spot",
        "spot.tolerations.0",
        "defaultPools",
        "head",
        "head.tolerations.0",
        "pod",
        "pod.patch",
        "pod.patch.metadata",
        "head.pod",
        "pools.gpu.pod",
        "job",
        "rayCluster",
        "serviceAccount",
        "launcher",
        "launcher.rbac",
        "launcher.rbac.subjects.0",
        "imagePullSecrets.0",
    ],
)
def test_unknown_key_is_refused_at_each_level(path):
    values: Any = {"misspelled": 1}
    for part in reversed(path.split(".") if path else []):
        values = [values] if part == "0" else {part: values}
    where = "/" + path.replace(".", "/") if path else ""
    assert f"at '{where}': additional properties 'misspelled' not allowed" in refusal(values)


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"image": 3}, "/image"),
        ({"image": None}, "missing property 'image'"),
        ({"imagePullPolicy": "Sometimes"}, "/imagePullPolicy"),
        ({"rayVersion": 2.6}, "/rayVersion"),
        ({"rayVersion": "2.60"}, "/rayVersion"),
        ({"pools": {"GPU": {"gpusPerNode": 8, "cpus": 1, "memoryGib": 1}}}, "GPU"),
        ({"pools": {"new": {"gpusPerNode": 8, "cpus": 1}}}, "missing property 'memoryGib'"),
        ({"pools": {"gpu": {"gpusPerNode": -1}}}, "/pools/gpu/gpusPerNode"),
        ({"pools": {"gpu": {"gpuResource": "gpu.intel.com/i915"}}}, "/pools/gpu/gpuResource"),
        ({"pools": {"gpu": {"memoryGib": 1.5}}}, "/pools/gpu/memoryGib"),
        ({"pools": {"gpu": {"cpus": "8"}}}, "/pools/gpu/cpus"),
        ({"storage": {"claim": {"size": "100"}}}, "/storage/claim/size"),
        ({"storage": {"claim": {"mountPath": "mnt"}}}, "/storage/claim/mountPath"),
        ({"storage": {"s3": {"path": "/models"}}}, "/storage/s3/path"),
        ({"rayCluster": {"replicas": -1}}, "/rayCluster/replicas"),
        ({"job": {"preRunningDeadlineSeconds": 0}}, "/job/preRunningDeadlineSeconds"),
        ({"job": {"keepHeadSecondsAfterFailure": -1}}, "/job/keepHeadSecondsAfterFailure"),
        ({"pools": {"gpu": {"gpuResource": "amd.com/mig-1g"}}}, "/pools/gpu/gpuResource"),
        ({"pools": {"gpu": {"network": {"preset": "ib"}}}}, "/pools/gpu/network/preset"),
        ({"operator": {"version": "1.5"}}, "/operator/version"),
        ({"queue": {"system": "slurm"}}, "/queue/system"),
        ({"queue": {"kueue": {"nodes": {"gpu": -1}}}}, "/queue/kueue/nodes/gpu"),
        ({"priorityClasses": [{"name": "system-a", "value": 1, "description": "a"}]}, "/name"),
        ({"quotas": {"hard": {"pods": 3}}}, "/quotas/hard/pods"),
        ({"security": {"namespace": {"podSecurity": "strict"}}}, "/security/namespace"),
        ({"security": {"networkPolicy": {"storageCidrs": ["10.0.0.1"]}}}, "/storageCidrs/0"),
        ({"monitoring": {"prometheusRule": {"slowRatio": 50}}}, "/slowRatio"),
        ({"monitoring": {"podMonitor": {"interval": "often"}}}, "/interval"),
    ],
)
def test_wrong_value_is_refused_by_place(values, where):
    message = refusal(values)
    assert "values don't meet the specifications of the schema" in message
    assert where in message


def test_a_parent_chart_may_pass_its_own_values():
    assert render({"global": {"region": "eu"}, "enabled": True})


@pytest.mark.parametrize(
    "template", sorted((CHART / "templates").glob("**/*.yaml")), ids=lambda p: p.name
)
def test_names_of_objects_come_from_the_names_file(template):
    text = template.read_text()
    names = re.findall(r"^metadata:\n  name: (.*)$", text, re.MULTILINE)
    assert len(names) == text.count("\nkind: ")
    assert names or 'include "trainyard.cronJob"' in text
    for name in names:
        assert re.fullmatch(
            r'\{\{ include "trainyard\.names\.\w+" (\.\w*|\$\w*) (\| quote )?\}\}', name
        )


def test_the_names_file_holds_names_alone():
    text = (CHART / "templates" / "_names.tpl").read_text()
    blocks = re.findall(r'\{\{- define "(.*?)" -\}\}\n(.*?)\n\{\{- end \}\}', text, re.DOTALL)
    assert len(blocks) == text.count("define")
    for name, body in blocks:
        assert name.startswith("trainyard.names.")
        assert "\n" not in body


def test_notes_lead_to_the_next_command(tmp_path):
    """helm template leaves NOTES.txt out, so its text is rendered as an object."""
    copy = tmp_path / "chart"
    shutil.copytree(CHART, copy)
    notes = copy / "templates" / "NOTES.txt"
    (copy / "templates" / "notes.yaml").write_text(
        'notes: {{ include "notes" . | quote }}\n{{- define "notes" }}'
        + notes.read_text()
        + "{{ end }}"
    )
    values = {
        "storage": {"claim": {"accessModes": ["ReadWriteOnce"], "keep": False}},
        "security": {"tokenAuthentication": False},
        "queue": {"system": "kai"},
    }
    rendered = run_helm(values, chart=copy)
    assert rendered.returncode == 0, rendered.stderr
    documents = yaml.safe_load_all(rendered.stdout)
    (text,) = [one["notes"] for one in documents if one and "notes" in one]
    for said in (
        "helm test trainyard -n team-vision",
        "trainyard submit examples/digits.yaml -n team-vision",
        "not ReadWriteMany",
        "storage.claim.keep is false",
        "security.tokenAuthentication is false",
        "No NetworkPolicy",
        "Each run file must set queue.name",
        "launcher.rbac.subjects",
    ):
        assert said in text


def test_lint_finds_nothing():
    lint = subprocess.run(
        [need_tool("helm"), "lint", "--strict", CHART], capture_output=True, text=True, check=False
    )
    assert lint.returncode == 0, lint.stdout
    assert "[WARNING]" not in lint.stdout + lint.stderr
