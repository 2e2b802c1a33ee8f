"""Changes to Transformers' Trainer, which TRL uses too: it resumes, and writes into the run's folder."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from trainyard_trainer.user_code.library_hook.complete import newest_transformers_checkpoint
from trainyard_trainer.user_code.library_hook.output import (
    FINISHED,
    in_run_folder,
    is_in_run_folder,
    say,
)

_trained: set[str] = set()
"""The output folders in which this process has started to train."""


_stopped: set[int] = set()
"""The `id()` of each trainer that SIGTERM has stopped."""


def change_arguments(module: Any) -> None:
    """Put a relative `output_dir` of TrainingArguments into the run's folder."""
    original = module.TrainingArguments.__post_init__

    @functools.wraps(original)
    def post_init(self: Any, *arguments: Any, **keywords: Any) -> None:
        if self.output_dir is not None:
            self.output_dir = in_run_folder(self.output_dir)
        original(self, *arguments, **keywords)

    module.TrainingArguments.__post_init__ = post_init


def change_trainer(module: Any) -> None:
    """Let `Trainer.train` resume, and put a relative folder of `save_model` into the run's folder."""
    train, save_model = module.Trainer.train, module.Trainer.save_model

    @functools.wraps(train)
    def resuming(
        self: Any, resume_from_checkpoint: Any = None, *arguments: Any, **keywords: Any
    ) -> Any:
        if resume_from_checkpoint in (None, True) and not arguments and not keywords.get("trial"):
            resume_from_checkpoint = _checkpoint_for(self, resume_from_checkpoint)
        result = train(self, resume_from_checkpoint, *arguments, **keywords)
        _record_finish(self)
        return result

    @functools.wraps(save_model)
    def saving(self: Any, output_dir: Any = None, *arguments: Any, **keywords: Any) -> Any:
        folder = None if output_dir is None else in_run_folder(str(output_dir))
        return save_model(self, folder, *arguments, **keywords)

    module.Trainer.train, module.Trainer.save_model = resuming, saving


def change_checkpoint_at_sigterm(module: Any) -> None:
    """Remember that a trainer has stopped because of SIGTERM (`enable_jit_checkpoint`)."""
    execute = module.CheckpointManager.execute_jit_checkpoint

    @functools.wraps(execute)
    def executing(self: Any) -> None:
        _stopped.add(id(self.trainer))
        execute(self)

    module.CheckpointManager.execute_jit_checkpoint = executing


def _record_finish(trainer: Any) -> None:
    """Record that a trainer has finished.

    It may have done fewer steps than `max_steps` if a callback ended it.
    """
    folder = trainer.args.output_dir
    if (
        id(trainer) in _stopped
        or not trainer.is_world_process_zero()
        or not is_in_run_folder(folder)
    ):
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    record = json.dumps({"global_step": trainer.state.global_step})
    (Path(folder) / FINISHED).write_text(record)


def _checkpoint_for(trainer: Any, requested: Any) -> Any:
    """Return the checkpoint to resume from: the newest complete one, or else the one that the script
    requests.

    The script's request is kept in two cases. A folder outside the run's folder may belong to another run. A
    folder in which this process has trained before has checkpoints of another trainer of the same script.
    """
    folder = trainer.args.output_dir
    if not is_in_run_folder(folder) or folder in _trained:
        return requested
    _trained.add(folder)
    checkpoint, exists = newest_transformers_checkpoint(folder, trainer.args.world_size)
    checkpoint, exists = _same_on_all_workers((checkpoint, exists), trainer.args.device)
    if checkpoint is not None:
        say(f"resuming from {checkpoint}")
        return checkpoint
    if exists:
        say(f"no checkpoint in {folder} is complete: training starts from the beginning")
        return None
    return requested


def _same_on_all_workers(found: Any, device: Any) -> Any:
    """Return the value of rank 0 on all workers: others may see new files of the shared storage later."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return found
    shared = [found]
    distributed.broadcast_object_list(shared, src=0, device=device)
    return shared[0]
