"""Names derived from a registry, such as that of recipes, do not depend on the order of its entries."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from trainyard.planning.authoring.schema import schema_of
from trainyard_trainer.config import trainer_config
from trainyard_trainer.config.data.sources import DATA_SOURCES, describe_preparable_sources
from trainyard_trainer.config.training import recipes
from trainyard_trainer.config.training.optimizers import OPTIMIZERS
from trainyard_trainer.config.training.recipes import BOOSTING, RECIPES

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for folder in ("launcher/trainyard", "train_image/trainyard_trainer")
    for path in (ROOT / folder).rglob("*.py")
)
ANOTHER_RECIPE = """

class AnotherRecipe(Train):
    recipe: Literal["another"]


RECIPE_MODELS = (*RECIPE_MODELS, AnotherRecipe)
"""


def test_no_module_takes_the_first_or_last_entry_of_a_registry() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and re.fullmatch(r"[A-Z]{3,}[A-Z_]*", node.value.id)
        and ast.unparse(node.slice) in ("0", "-1")
        and node.value.id not in PAIRS
    ]
    assert found == []


PAIRS = {"TESTED"}
"""Constants that are a pair with a first and a last version, and no registry."""


def test_a_recipe_appended_to_the_registry_leaves_gradient_boosting_valid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry, name, rest = Path(recipes.__file__).read_text().partition("\n\ndef recipe_of(")
    assert name
    assert "RECIPE_MODELS" in registry
    extended = ModuleType(recipes.__name__)
    monkeypatch.setitem(sys.modules, recipes.__name__, extended)
    code = f"{registry}{ANOTHER_RECIPE}{name}{rest}".replace(
        "import Annotated,", "import Annotated, Literal,"
    )
    exec(compile(code, "extended_recipes.py", "exec"), extended.__dict__)
    assert (*RECIPES, "another") == extended.RECIPES
    assert extended.BOOSTING == BOOSTING == "gradient_boosting"
    # Its imports find the extended registry.
    module = ModuleType("extended_trainer_config")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    code = Path(trainer_config.__file__).read_text()
    exec(compile(code, "extended_trainer_config.py", "exec"), module.__dict__)
    example = yaml.safe_load((ROOT / "examples/gradient_boosting.yaml").read_text())
    assert module.kinds_of(example) == ["gradient_boosting"]
    assert module.KINDS["gradient_boosting"].__name__ == "BoostingConfig"


def test_every_data_source_is_in_the_schema_and_images_in_the_help() -> None:
    definitions = schema_of("run")["$defs"]
    described = " ".join(
        definitions[name]["properties"]["source"]["description"] for name in ("Data", "Table")
    )
    for source in DATA_SOURCES:
        assert source.description in described, source.name
        assert set(source.recipes) <= set(RECIPES), source.name
        is_in_help = source.description in describe_preparable_sources() or source.is_built_in
        assert is_in_help or source.is_prepared or "image_classification" not in source.recipes


def test_every_optimizer_is_in_the_schema() -> None:
    definitions = schema_of("run")["$defs"]
    for recipe in ("ImageClassification", "LanguageModel"):
        description = definitions[recipe]["properties"]["optimizer"]["description"]
        for name in OPTIMIZERS:
            assert f"{{name: {name}, ...}}" in description
