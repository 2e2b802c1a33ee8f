"""Run a module or a file as the main program, isolated from the current folder and PYTHONPATH.

Started by `isolated` as `python -I start.py [--with-code] MODULE_OR_FILE ARGUMENT...`. With
`--with-code`, modules of the current folder and of PYTHONPATH can be imported, but never replace an
installed package. Folders of PYTHONPATH that contain installed packages, as environment modules set
them, come last on the import path.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

WITH_CODE = "--with-code"

PACKAGES = str(Path(__file__).resolve().parents[3])
"""The folder of this package, which is not on the import path if it is not installed."""


def python_path(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the folders of PYTHONPATH."""
    return [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]


def has_installed_packages(folder: str) -> bool:
    """Return whether packages are installed into a folder, as into site-packages."""
    names = Path(folder).iterdir() if Path(folder).is_dir() else ()
    return any(path.name.endswith((".dist-info", ".egg-info")) for path in names)


def forget_user_folders() -> None:
    """Remove the current folder (of `python -m`) and the user's PYTHONPATH from the import path.

    Folders of PYTHONPATH that contain this program or installed packages stay.
    """
    if sys.argv[0].endswith("__main__.py") and sys.path[0] == str(Path.cwd()):
        del sys.path[0]
    for folder in python_path():
        is_kept = has_installed_packages(folder) or (Path(folder) / "trainyard").is_dir()
        if folder in sys.path and folder != PACKAGES and not is_kept:
            sys.path.remove(folder)


def main() -> None:
    """Run the program that the command line names."""
    if PACKAGES not in sys.path:
        sys.path.insert(0, PACKAGES)  # before another copy that is installed
    folders = filter(has_installed_packages, python_path())
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    del sys.argv[0]
    if sys.argv[0] == WITH_CODE:
        del sys.argv[0]
        from trainyard_trainer.run_files.programs import code_imports

        code_imports.install([str(Path.cwd()), *python_path()])
    while sys.argv[0].startswith("-"):
        del sys.argv[0]  # Ray repeats options of the Python interpreter, such as -s.
    program = sys.argv[0]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
