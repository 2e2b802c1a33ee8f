"""Change modules of training libraries right after they are imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from trainyard_trainer.user_code.library_hook import lightning, transformers

Change = Callable[[Any], None]

CHANGES: Mapping[str, Change] = {
    "transformers.training_args": transformers.change_arguments,
    "transformers.trainer": transformers.change_trainer,
    "transformers.trainer_jit_checkpoint": transformers.change_checkpoint_at_sigterm,
    "lightning.pytorch.trainer.trainer": lightning.change_trainer,
    "pytorch_lightning.trainer.trainer": lightning.change_trainer,
}
"""The function that changes a module, by the module's name."""


class ChangeAfterImport(MetaPathFinder):
    """Import hook that changes each module of `changes` once, right after the module has been executed."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self._pending = dict(changes)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = self._pending.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)  # by the other finders
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module
        spec.loader.exec_module = partial(_execute, execute, change)  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Install the import hook in this process."""
    sys.meta_path.insert(0, ChangeAfterImport(CHANGES))


def _execute(execute: Callable[[ModuleType], None], change: Change, module: ModuleType) -> None:
    """Execute a module with its loader, and then change it."""
    execute(module)
    change(module)
