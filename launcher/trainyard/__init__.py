"""The launcher of trainyard: from a run file to a plan, to Kubernetes objects, to a run on a cluster.

docs/guides/python.md shows the Python API for notebooks and pipelines. The names of this module are imported
when they are first used, so `import trainyard` alone costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # what `typing` has, without importing it
if TYPE_CHECKING:
    from typing import Any

    from trainyard.api import plan_run, render_run, submit_run, train_run, watch_run
    from trainyard.run import Run
    from trainyard.run_file.load import load_run

__all__ = [
    "Run",
    "load_run",
    "plan_run",
    "render_run",
    "submit_run",
    "train_run",
    "watch_run",
]

_PLACES = {"Run": "trainyard.run", "load_run": "trainyard.run_file.load"}
"""The modules of the names that are not in `trainyard.api`."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES.get(name, "trainyard.api")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
