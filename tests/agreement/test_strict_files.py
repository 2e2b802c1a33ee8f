"""No mapping of a JSON or YAML file in the repository, or of a rendered chart, has a key twice."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from strict_files import DuplicateKeyError, strict_json, strict_yaml

from tests.charts.helm_chart import run_helm
from trainyard.planning.plan import plan_run
from trainyard.platform import load_platform
from trainyard.run_file.load import load_run

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "charts/trainyard/templates"


def tracked(*endings: str) -> list[str]:
    """Files with these endings that git knows, except templates, which are valid only when they are
    rendered."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(
        [*command, *(f"*.{ending}" for ending in endings)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    found = [ROOT / name for name in names]
    return [
        str(path.relative_to(ROOT))
        for path in found
        if path.is_file() and TEMPLATES not in path.parents
    ]


def test_the_search_finds_the_files() -> None:
    assert "charts/trainyard/values.schema.json" in tracked("json")
    assert {"charts/trainyard/values.yaml", "examples/digits.yaml"} <= set(tracked("yaml", "yml"))


@pytest.mark.parametrize("name", tracked("json"))
def test_a_json_file_has_each_key_once(name: str) -> None:
    strict_json((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", tracked("yaml", "yml"))
def test_a_yaml_file_has_each_key_once(name: str) -> None:
    strict_yaml((ROOT / name).read_text(encoding="utf-8"))


EVERYTHING = {
    "rayCluster": {"enabled": True},
    "prePull": {"enabled": True},
    "test": {"gpus": True},
    "disruptionBudget": {"heads": True},
    "pools": {
        "gpu": {"network": {"preset": "efa"}, "ephemeralStorageGib": 100, "gpuMemoryGib": 80}
    },
    "queue": {"system": "kueue", "name": "a", "kueue": {"clusterQueue": "b", "nodes": {"gpu": 1}}},
    "quotas": {"hard": {"pods": "9"}, "limitRange": {"max": {"cpu": "9"}}},
    "job": {"separateAttempts": True},
    "security": {
        "namespace": {"create": True},
        "networkPolicy": {"enabled": True, "apiServerCidrs": ["10.0.0.1/32"]},
    },
    "launcher": {
        "rbac": {"subjects": [{"kind": "Group", "name": "vision"}]},
        "clusterRbac": {"create": True},
    },
    "monitoring": {
        "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dashboards": {"enabled": True},
    },
}
S3 = {"claim": None, "s3": {"path": "s3://a", "endpoint": "http://minio:9000", "secretName": "b"}}


@pytest.mark.parametrize("storage", [{}, S3], ids=["claim", "s3"])
def test_rendered_objects_of_the_chart_have_each_key_once(storage: dict[str, object]) -> None:
    rendered = run_helm(EVERYTHING | {"storage": storage})
    assert rendered.returncode == 0, rendered.stderr
    objects = [one for one in strict_yaml(rendered.stdout) if one]
    assert len(objects) > 20
    for config_map in (one for one in objects if one["kind"] == "ConfigMap"):
        for name, text in config_map["data"].items():
            strict_json(text) if name.endswith(".json") else strict_yaml(text)


def test_the_rendered_template_of_the_rayjob_has_each_key_once() -> None:
    from jinja2 import Environment, StrictUndefined

    template = (ROOT / "manifests/rayjob.yaml.j2").read_text()
    run = load_run(ROOT / "examples/digits.yaml", gpus="16")
    plan = plan_run(run, load_platform(None), "team")
    rendered = Environment(undefined=StrictUndefined, autoescape=False).from_string(template)
    assert len(strict_yaml(rendered.render(plan=plan))) == 2


@pytest.mark.parametrize("text", ['{"a": 1, "a": 1}', '[{"b": {"a": 1, "c": 2, "a": 3}}]'])
def test_a_key_that_occurs_twice_is_refused(text: str) -> None:
    with pytest.raises(DuplicateKeyError, match="'a' occurs twice"):
        strict_json(text)
    with pytest.raises(DuplicateKeyError, match="'a' occurs twice"):
        strict_yaml(text)


def test_yaml_anchors_may_be_merged_and_overridden() -> None:
    text = "base: &base {a: 1}\nb: {<<: *base, a: 2}\n"
    assert strict_yaml(text) == [{"base": {"a": 1}, "b": {"a": 2}}]
    with pytest.raises(yaml.YAMLError):
        strict_yaml("a: [")
    with pytest.raises(ValueError, match="NaN"):
        strict_json("[NaN]")
