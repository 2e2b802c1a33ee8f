"""Changes to Lightning's Trainer: it resumes, and writes into the run's folder."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from trainyard_trainer.user_code.library_hook.complete import newest_lightning_checkpoint
from trainyard_trainer.user_code.library_hook.output import (
    in_run_folder,
    is_in_run_folder,
    run_folder,
    say,
)

_trained: set[str] = set()
"""The root folders in which this process has started to train."""


def change_trainer(module: Any) -> None:
    """Let `Trainer.fit` resume, and put relative folders of the trainer into the run's folder."""
    init, fit = module.Trainer.__init__, module.Trainer.fit

    @functools.wraps(init)
    def initialise(self: Any, *arguments: Any, **keywords: Any) -> None:
        root = keywords.get("default_root_dir") or os.environ.get("PL_TRAINER_DEFAULT_ROOT_DIR")
        keywords["default_root_dir"] = (
            str(run_folder()) if root is None else in_run_folder(str(root))
        )
        init(self, *arguments, **keywords)
        for callback in self.checkpoint_callbacks:
            if getattr(callback, "dirpath", None):
                callback.dirpath = _moved_into_run_folder(callback.dirpath)

    @functools.wraps(fit)
    def resuming(self: Any, *arguments: Any, **keywords: Any) -> Any:
        # fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path)
        if len(arguments) < 5 and keywords.get("ckpt_path") is None:
            keywords["ckpt_path"] = _checkpoint_for(self)
        return fit(self, *arguments, **keywords)

    module.Trainer.__init__, module.Trainer.fit = initialise, resuming


def _moved_into_run_folder(folder: str) -> str:
    """Replace a path below the working directory with the same relative path in the run's folder.

    Lightning has made relative paths absolute by then: it does so when a callback is created.
    """
    current = Path.cwd().resolve()
    if is_in_run_folder(folder) or not Path(folder).is_relative_to(current):
        return folder
    return in_run_folder(str(Path(folder).relative_to(current)))


def _checkpoint_for(trainer: Any) -> str | None:
    """Return the newest complete checkpoint of earlier attempts in the run's folder.

    Returns None if this process has trained in the same root folder before: the checkpoints there may be
    those of another trainer of the same script.
    """
    folders = {
        trainer.default_root_dir,
        *(callback.dirpath for callback in trainer.checkpoint_callbacks if callback.dirpath),
    }
    root = trainer.default_root_dir
    if root in _trained or not all(map(is_in_run_folder, folders)):
        return None
    _trained.add(root)
    if any(getattr(each, "save_weights_only", False) for each in trainer.checkpoint_callbacks):
        return None
    checkpoint = newest_lightning_checkpoint(folders)
    # There is no process group yet. All workers find the same checkpoint, as none saves before all have
    # joined.
    if checkpoint is not None:
        say(f"resuming from {checkpoint}")
    return checkpoint
