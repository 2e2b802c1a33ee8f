"""`trainyard_trainer` offers the names for user code without loading torch or Ray itself."""

from __future__ import annotations

import subprocess
import sys
from typing import get_origin

import pytest

import trainyard_trainer
from trainyard_trainer.recipes.recipe import Recipe
from trainyard_trainer.user_code.run_config import run_config


def test_user_code_imports_what_it_needs_from_the_package() -> None:
    assert trainyard_trainer.Recipe is Recipe
    assert trainyard_trainer.run_config is run_config
    assert set(trainyard_trainer.__all__) <= set(dir(trainyard_trainer))
    for name in trainyard_trainer.__all__:
        value = getattr(trainyard_trainer, name)
        assert get_origin(value) is not None or value.__name__ == name  # an alias has no name


def test_the_package_alone_loads_neither_torch_nor_ray() -> None:
    script = (
        "import sys, trainyard_trainer, trainyard_trainer.config.trainer_config;"
        "sys.exit(sorted({'torch', 'ray'} & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        trainyard_trainer.no_such_name  # noqa: B018
