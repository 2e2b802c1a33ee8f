"""The file in which Ray Train keeps what it knows of a run's checkpoints; without it, nothing is resumed.

Ray 2.60 writes it in place (`CheckpointManager._write_state_to_storage`), so a kill can leave half of it,
and refuses to start where it is cut or names a checkpoint that is gone. An intact copy is kept beside it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from trainyard_trainer.run_files.names import RAY_SNAPSHOT
from trainyard_trainer.run_folder.folder import RunFolder


class RaySnapshot:
    """That file of a run which a `TorchTrainer` with the run's name and storage has made."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._path = f"{folder.root}/{RAY_SNAPSHOT}"
        self._copy = f"{self._path}.intact"
        self._kept = b""
        self._kept_at = 0.0

    def keep(self, *, if_older_s: float = 0.0) -> None:
        """Copy the file if it is intact and new, unless that was looked at a moment ago. Raises OSError."""
        if time.monotonic() - self._kept_at < if_older_s:
            return
        self._kept_at = time.monotonic()
        text = self._read(self._path)
        if text != self._kept and not self._problem(text):
            self._folder.write(self._copy, text)
            self._kept = text

    def repair(self, say: Callable[[str], None]) -> None:
        """Put the intact copy in the place of a file with which Ray Train would not start.

        Without one the file is moved away: the program starts from what it finds by itself.
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
        say(f"{self._folder.show(self._path)} {problem}: {what}; it lies in {RAY_SNAPSHOT}.broken")

    def _read(self, path: str) -> bytes:
        """Empty where there is no such file."""
        try:
            return self._folder.read(path)
        except FileNotFoundError:
            return b""

    def _problem(self, text: bytes) -> str:
        """Why Ray Train would not start with it; empty where it would."""
        try:
            results = json.loads(text)["checkpoint_results"]
            names = [result["checkpoint_dir_name"] for result in results]
        except (ValueError, KeyError, TypeError):
            return "is cut off"
        gone = [name for name in names if not self._folder.exists(f"{self._folder.root}/{name}")]
        return f"names checkpoint {gone[0]}, which is gone" if gone else ""
