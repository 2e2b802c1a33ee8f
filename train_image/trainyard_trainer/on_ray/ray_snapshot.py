"""Ray Train's snapshot of the checkpoint manager, from which a run with its own training function resumes.

Ray 2.60 overwrites the file in place (`CheckpointManager._write_state_to_storage`), so a kill can truncate
it. Ray Train fails to start with a truncated file, or one that lists a deleted checkpoint. Therefore a copy
of the last intact snapshot is kept in the same folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from trainyard_trainer.run_files.names import RAY_SNAPSHOT
from trainyard_trainer.run_folder.folder import RunFolder


class RaySnapshot:
    """The snapshot of a `TorchTrainer` with the name and the storage of the run."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._path = f"{folder.root}/{RAY_SNAPSHOT}"
        self._copy = f"{self._path}.intact"
        self._kept = b""
        self._kept_at = 0.0

    def keep(self, *, if_older_s: float = 0.0) -> None:
        """Copy the snapshot if it is intact and has changed. Do nothing within `if_older_s` of the last call.

        Raises StorageError.
        """
        if time.monotonic() - self._kept_at < if_older_s:
            return
        self._kept_at = time.monotonic()
        text = self._read(self._path)
        if text != self._kept and not self._problem(text):
            self._folder.write(self._copy, text)
            self._kept = text

    def repair(self, say: Callable[[str], None]) -> None:
        """Replace a snapshot with which Ray Train would not start by the intact copy.

        If there is no intact copy, only move the broken snapshot away. Ray Train then starts without
        checkpoints.
        """
        if not self._folder.exists(self._path):
            return
        problem = self._problem(self._read(self._path))
        if not problem:
            return
        copy = self._read(self._copy)
        aside = f"{self._path}.broken"
        self._folder.move(self._path, aside)
        what = "Ray Train starts without it"
        if not self._problem(copy):
            self._folder.write(self._path, copy)
            what = "its last intact copy is used"
        say(
            f"{self._folder.show(self._path)} {problem}: {what}. The broken file was moved to "
            f"{RAY_SNAPSHOT}.broken"
        )

    def _read(self, path: str) -> bytes:
        """Return the content of a file, or empty bytes if it does not exist."""
        try:
            return self._folder.read(path)
        except FileNotFoundError:
            return b""

    def _problem(self, text: bytes) -> str:
        """Return why Ray Train would not start with a snapshot, or an empty string if it would."""
        try:
            results = json.loads(text)["checkpoint_results"]
            names = [result["checkpoint_dir_name"] for result in results]
        except (ValueError, KeyError, TypeError):
            return "is truncated"
        gone = [name for name in names if not self._folder.exists(f"{self._folder.root}/{name}")]
        return f"lists checkpoint {gone[0]}, which no longer exists" if gone else ""
