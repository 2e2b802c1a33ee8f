"""Check the output that a training library has left in the run's folder, and let the group read it."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from trainyard_trainer.errors import RunError
from trainyard_trainer.user_code.library_hook.output import FINISHED

STATE = "trainer_state.json"
"""The file with the progress of training, in each checkpoint of Transformers' Trainer."""


def require_finished(folder: Path, since: float) -> None:
    """Raise RunError if Transformers' Trainer has stopped before its last step, although it exited with 0.

    It does so after SIGTERM, if `enable_jit_checkpoint` is set. Only files that were written after `since`,
    the time at which the program started, are examined.
    """
    states = [path for path in folder.rglob(STATE) if path.stat().st_mtime >= since]
    if not states:
        return
    newest = max(states, key=lambda path: path.stat().st_mtime_ns)
    try:
        state = json.loads(newest.read_text())
    except ValueError:
        return  # The program was killed while it wrote the file in place.
    step, last = state.get("global_step"), state.get("max_steps")
    if not (isinstance(step, int) and isinstance(last, int)) or step >= last:
        return
    if not is_stopped_by_callback(state) and not _has_finished(newest, step, since):
        raise RunError(
            f"the program ended with exit code 0 at step {step} of {last} "
            f"({newest.relative_to(folder)})\n"
            "       It has probably saved and stopped after SIGTERM. Start the run again to resume from "
            "there."
        )


def is_stopped_by_callback(state: dict[str, object]) -> bool:
    """Return whether EarlyStoppingCallback has ended the training."""
    callbacks = state.get("stateful_callbacks")
    early = callbacks.get("EarlyStoppingCallback") if isinstance(callbacks, dict) else None
    if not isinstance(early, dict):
        return False
    patience = early.get("args", {}).get("early_stopping_patience")
    counter = early.get("attributes", {}).get("early_stopping_patience_counter")
    return isinstance(patience, int) and isinstance(counter, int) and counter >= patience


def _has_finished(state: Path, step: int, since: float) -> bool:
    """Return whether the library hook has recorded that the trainer of this state has finished after it."""
    records = [folder / FINISHED for folder in state.parents[:2]]
    return any(
        record.is_file()
        and record.stat().st_mtime >= since
        and json.loads(record.read_text())["global_step"] >= step
        for record in records
    )


def open_to_group(folder: Path) -> None:
    """Let the storage's group read all files; safetensors creates files that only their owner can read."""
    for parent, folders, files in os.walk(folder):
        for names, bits in ((folders, stat.S_IRGRP | stat.S_IXGRP), (files, stat.S_IRGRP)):
            for path in (Path(parent, name) for name in names):
                status = path.lstat()
                is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
                if is_plain and status.st_uid == os.getuid() and status.st_mode & bits != bits:
                    path.chmod(stat.S_IMODE(status.st_mode) | bits)
