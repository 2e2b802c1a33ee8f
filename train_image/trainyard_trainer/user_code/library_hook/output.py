"""Redirect the output of a library: a relative output folder becomes a folder in the run's folder."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

FOLDER_VARIABLE = "TRAINYARD_OUTPUT_FOLDER"
"""The environment variable with the run's folder on this machine."""


FINISHED = ".trainyard-finished.json"
"""The file that marks an output folder whose trainer has finished, and was not stopped by SIGTERM."""


def run_folder() -> Path:
    """Return the run's folder on this machine."""
    return Path(os.environ[FOLDER_VARIABLE])


def in_run_folder(path: str) -> str:
    """Return the path of an output folder. A relative path is resolved in the run's folder.

    A symbolic link with the same relative path points there, so that the program finds its files again.
    """
    if Path(path).is_absolute() or "://" in path or path.startswith("~"):
        return path
    relative = Path(os.path.normpath(path))
    if not relative.parts or relative.parts[0] == os.pardir:
        return str(run_folder() / "output")
    target = run_folder() / relative
    target.mkdir(parents=True, exist_ok=True)
    # Another worker may have created the link, or the working directory may be read-only.
    with suppress(OSError):
        Path(relative.parts[0]).symlink_to(run_folder() / relative.parts[0])
    return str(target)


def is_in_run_folder(path: str) -> bool:
    """Return whether a path lies in the run's folder."""
    return Path(path).resolve().is_relative_to(run_folder().resolve())


def say(text: str) -> None:
    """Print a line of the hook to the program's output, once for each group of workers."""
    if os.environ.get("RANK", "0") == "0":
        print(f"trainyard: {text}", file=sys.stderr, flush=True)
