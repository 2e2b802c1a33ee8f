"""Command lines that start Python so that no file of the user replaces a module of trainyard or a dependency.

`python -m` puts the current folder first on the import path, and PYTHONPATH precedes installed
packages as well. A `torch.py` or `logging.py` there would be imported in place of the real module.
`-I` ignores both. Unlike `-P` it exists in Python 3.10, and Python passes it on to the processes that
`multiprocessing` starts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trainyard_trainer.run_files.programs.start import WITH_CODE

START = str(Path(__file__).with_name("start.py"))
"""The program that runs a module in an isolated Python."""

IN_PODS = ("python", "-I", "-u", "-m")
"""How the image's Python starts one of its modules. The package is installed there."""


def isolated_python() -> list[str]:
    """Return the beginning of a command line that runs a module, or a file whose name ends in `.py`."""
    return [sys.executable, "-I", "-u", START]


def isolated(program: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module or a file in an isolated Python."""
    return [*isolated_python(), program, *arguments]


def python_with_code() -> list[str]:
    """Return the same beginning for a Python that can also import the code in its current folder."""
    return [*isolated_python(), WITH_CODE]
