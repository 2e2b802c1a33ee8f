"""The JSON Schemas are today's, hold for what is right, and refuse what is wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import yaml

from trainyard.planning.authoring.init import run_text
from trainyard.planning.authoring.schema import Kind, schema_of

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
DIGITS = yaml.safe_load((ROOT / "examples/digits.yaml").read_text())
PLATFORM = yaml.safe_load((ROOT / "launcher/trainyard/platform.yaml").read_text())


def problems(kind: Kind, document: Any) -> list[str]:
    validator = jsonschema.Draft202012Validator(schema_of(kind))
    return [error.message for error in validator.iter_errors(document)]


@pytest.mark.parametrize("kind", get_args(Kind))
def test_the_schemas_in_the_tree_are_todays(kind: Kind) -> None:
    file = ROOT / "schemas" / f"{kind}.schema.json"
    assert json.loads(file.read_text()) == schema_of(kind), "If it is meant, run `make golden`."


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_schema_is_one(kind: Kind) -> None:
    jsonschema.Draft202012Validator.check_schema(schema_of(kind))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_is_valid_and_names_its_schema(example: Path) -> None:
    assert problems("run", yaml.safe_load(example.read_text())) == []
    first = example.read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=../schemas/run.schema.json"
    assert (example.parent / first.partition("$schema=")[2]).exists()


def test_the_packaged_platform_is_valid() -> None:
    assert problems("platform", PLATFORM) == []


def test_a_new_run_file_is_valid() -> None:
    assert problems("run", yaml.safe_load(run_text(DIGITS))) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("resources", {"gpus": 16}),
        ("resources", {"gpus": {"min": 8, "max": 16}, "pool": "a"}),
        ("resources", {"gpus": 16, "pool": ["a100-spot", "a100"]}),
        ("resources.data", {"nodes": 2}),
        ("train.optimizer", {"name": "adamw", "learning_rate": 1}),
        ("network", {"preset": "efa", "devices_per_node": 4}),
    ],
)
def test_what_the_launcher_takes_is_valid(path: str, value: Any) -> None:
    assert problems("run", changed(DIGITS, path, value)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("train.epoch", 3),
        ("train.epochs", "3"),
        ("train.epochs", 0),
        ("train.optimizer", {"name": "adam"}),
        ("train.optimizer", {"name": "adamw", "momentum": 0.5}),
        ("data.loader", "tensorflow"),
        ("data", None),
        ("name", "Digits"),
        ("name", "a" * 39),
        ("resources", {}),
        ("resources", {"gpus": 8, "workers": 2}),
        ("resources", {"gpus": 0}),
        ("resources", {"gpus": 8193}),
        ("resources", {"gpus": {"min": 8}}),
        ("resources", {"gpus": {"min": 8, "max": 16, "step": 8}}),
        ("resources", {"gpus": 8, "pool": []}),
        ("resources", {"gpus": 8, "pool": ["a", "a"]}),
        ("nmae", "digits"),
    ],
)
def test_a_wrong_run_file_is_refused(path: str, value: Any) -> None:
    assert problems("run", changed(DIGITS, path, value)) != []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("kuberay", "1.5"),
        ("head.cpu", 2),
        ("head.workersPerCpu", 0),
        ("pools", {}),
        ("storage", None),
        ("queue", {"system": "slurm"}),
    ],
)
def test_a_wrong_platform_is_refused(path: str, value: Any) -> None:
    assert problems("platform", changed(PLATFORM, path, value)) != []


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_key_is_described(kind: Kind) -> None:
    schema = schema_of(kind)
    for name, section in {"": schema, **schema["$defs"]}.items():
        assert section["additionalProperties"] is False
        for key, value in section["properties"].items():
            said = schema["$defs"][value["$ref"].rpartition("/")[2]] if "$ref" in value else {}
            assert (said | value).get("description"), f"{name}.{key}"


def changed(document: Any, path: str, value: Any) -> Any:
    document = copy.deepcopy(document)
    *sections, key = path.split(".")
    place = document
    for section in sections:
        place = place[section]
    place[key] = value
    return document
