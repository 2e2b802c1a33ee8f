"""Import a part of a package without all that the package itself imports."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec


@contextmanager
def partial_import(package: str) -> Iterator[None]:
    """Let imports of modules of a package in this block leave out the package's own `__init__.py`.

    That of `kubernetes` imports all of its modules, and for these the libraries of Google, OAuth and JSON
    Schema, which takes longer than a request. The modules of this block are the only ones that stay: who
    imports the package later gets all of it.
    """
    if package in sys.modules:
        yield
        return
    spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    sys.modules[package] = module_from_spec(spec)
    try:
        yield
    finally:
        del sys.modules[package]
