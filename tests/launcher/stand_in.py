"""A program that stands in for the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainyard_trainer.run_files.programs import isolation

START = """
import runpy, sys
from pathlib import Path
sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).parent))
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def stand_in_for_trainer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run modules of `folder` in place of the installed ones; return the main module of the trainer there."""
    (folder / "start.py").write_text(START)
    monkeypatch.setattr(isolation, "START", str(folder / "start.py"))
    package = folder / "trainyard_trainer"
    package.mkdir()
    (package / "__init__.py").touch()
    return package / "__main__.py"
