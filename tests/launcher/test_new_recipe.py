"""A new recipe has a run file, code and a test that work, and a schema by which its settings are checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard.__main__ import run
from trainyard.errors import ConfigError
from trainyard.planning.plan import plan_run
from trainyard.platform import Platform
from trainyard.run import Run
from trainyard.run_file.load import load_run
from trainyard_trainer.run_files.recipe_schema import schema_file

PACKAGE = Path(__file__).parents[2] / "train_image"


@pytest.fixture
def skeleton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which `trainyard init --recipe my_model` was called."""
    monkeypatch.chdir(tmp_path)
    assert run(["init", "--recipe", "my_model"]) == 0
    return tmp_path


def settings_of(folder: Path, **model: Any) -> None:
    """Set `train.model` in the run file of a skeleton."""
    document = yaml.safe_load((folder / "run.yaml").read_text())
    document["train"]["model"] = model
    (folder / "run.yaml").write_text(yaml.safe_dump(document))


def test_the_files_of_a_new_recipe_name_each_other(skeleton: Path, platform: Platform) -> None:
    files = {str(file.relative_to(skeleton)) for file in skeleton.rglob("*.*")}
    assert files == {"run.yaml", "code/my_model.py", "code/test_my_model.py"}
    planned = load_run(skeleton / "run.yaml")
    assert (planned.name, planned.train.recipe) == ("my-model", "my_model:MyModel")
    assert plan_run(planned, platform, "team").workers == 2
    assert "@" not in "".join(file.read_text() for file in skeleton.rglob("*.*"))


@pytest.mark.ci
def test_the_test_of_a_new_recipe_passes(skeleton: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "code"]
    environment = os.environ | {"PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(
        command, cwd=skeleton, env=environment, text=True, capture_output=True, check=False
    )
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done.stdout


@pytest.mark.ci
def test_a_new_recipe_trains_and_its_schema_refuses_wrong_settings(
    skeleton: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "run.yaml", "--without-ray", "--set", "train.epochs=1"]) == 0
    summary = json.loads((skeleton / "runs/my-model/summary.json").read_text())
    assert summary["outcome"] == "succeeded"
    result = Run("my-model", storage=skeleton / "runs").result()
    with pytest.raises(ConfigError, match="trust_code=True in Python"):
        result.model()
    assert sum(weight.numel() for weight in result.model(trust_code=True).parameters()) == 129
    assert run(["recipe", "schema", "run.yaml"]) == 0
    assert f"code/{schema_file('my_model:MyModel')} is written" in capfd.readouterr().out
    load_run(skeleton / "run.yaml")
    settings_of(skeleton, width=0, wdith=3)
    with pytest.raises(ConfigError) as refused:
        load_run(skeleton / "run.yaml")
    assert {*refused.value.details} >= {
        "train.model.wdith: unknown key; did you mean width?",
        "train.model.width = 0: is less than the minimum of 1",
    }


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--recipe", "torch"), "--recipe = torch cannot be the name of your module"),
        (("--recipe", "My-Model"), "--recipe = My-Model cannot be the name of your module"),
        (("--recipe", "other", "--name", "Other_1"), "--name = 'Other_1'"),
        (("--recipe", "other", "--epochs", "3"), "--recipe takes no option beside --name"),
        (("x.yaml", "--recipe", "my_model"), "code/my_model.py exists already"),
    ],
)
def test_a_new_recipe_that_cannot_be_is_refused_and_nothing_is_written(
    skeleton: Path,
    options: tuple[str, ...],
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = {file: file.read_text() for file in skeleton.rglob("*.*")}
    (file, *others) = options if options[0].endswith(".yaml") else ("y.yaml", *options)
    assert run(["init", file, *others]) == 2
    assert problem in capsys.readouterr().err
    assert {file: file.read_text() for file in skeleton.rglob("*.*")} == before


# The schema of settings.

SCHEMA = {
    "additionalProperties": False,
    "properties": {
        "width": {"type": "integer", "minimum": 1},
        "head": {
            "additionalProperties": False,
            "properties": {"kind": {"enum": ["linear", "deep"]}},
            "required": ["kind"],
        },
    },
    "required": ["width"],
}


@pytest.mark.parametrize(
    ("model", "problems"),
    [
        ({"width": 3, "head": {"kind": "deep"}}, ()),
        ({}, ("train.model.width: is required",)),
        ({"width": "3"}, ("train.model.width = '3': is not of type 'integer'",)),
        (
            {"width": 3, "layers": 1},
            ("train.model.layers: unknown key; known keys: width, head",),
        ),
        (
            {"width": 3, "head": {"kin": 1}},
            ("train.model.head.kin: unknown key; did you mean kind?",),
        ),
        (
            {"width": 3, "head": {"kind": "wide"}},
            ("train.model.head.kind = 'wide': is not one of ['linear', 'deep']",),
        ),
    ],
)
def test_settings_are_checked_by_the_schema_beside_the_code(
    skeleton: Path, model: dict[str, Any], problems: tuple[str, ...]
) -> None:
    (skeleton / "code" / schema_file("my_model:MyModel")).write_text(json.dumps(SCHEMA))
    settings_of(skeleton, **model)
    if not problems:
        load_run(skeleton / "run.yaml")
        return
    with pytest.raises(ConfigError) as refused:
        load_run(skeleton / "run.yaml")
    assert set(problems) <= set(refused.value.details)
    assert "`trainyard recipe schema`" in refused.value.details[-1]


@pytest.mark.parametrize("text", ["{", '{"type": "nothing"}'])
def test_a_file_that_is_no_schema_is_told(skeleton: Path, text: str) -> None:
    (skeleton / "code" / schema_file("my_model:MyModel")).write_text(text)
    with pytest.raises(ConfigError, match="is no JSON Schema"):
        load_run(skeleton / "run.yaml")


def test_a_schema_needs_a_recipe_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["init", "digits.yaml"]) == 0
    assert run(["recipe", "schema", "digits.yaml"]) == 2
    assert "has no recipe of your own" in capsys.readouterr().err


# `verify`.


@pytest.mark.ci
def test_a_new_recipe_passes_its_verification(
    skeleton: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", "run.yaml", "--steps=3", "--json"]) == 0
    results = json.loads(capfd.readouterr().out)
    assert {each["result"] for each in results} == {"ok"}
    assert not (skeleton / "runs").exists()


def test_only_runs_with_a_network_are_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[2] / "examples/command.yaml"
    assert run(["verify", str(example)]) == 2
    assert "has no recipe that trains a network" in capsys.readouterr().err
    assert run(["verify", str(example), "--steps=2"]) == 2
    assert "2 is not a whole number of at least 3" in capsys.readouterr().err
