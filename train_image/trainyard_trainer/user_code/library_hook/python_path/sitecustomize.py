"""Install the library hook when Python starts, and then run the `sitecustomize` module that this file
hides."""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path


def _run_hidden() -> None:
    """Run the next `sitecustomize` on the import path, if there is one."""
    here = Path(__file__).resolve().parent
    others = [folder for folder in sys.path if Path(folder).resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# A Python other than the image's may not have the package.
if importlib.util.find_spec("trainyard_trainer") is not None:
    from trainyard_trainer.user_code.library_hook import imports

    imports.install()
_run_hidden()
