"""Import the user's modules without letting them replace the standard library or what trainyard depends on.

A module of the user's code takes precedence over an installed module of the same name, as in Python, with one
exception: the standard library, and the packages that trainyard needs with all that they depend on.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

DEPENDENCIES = (
    *(
        "deepspeed",
        "lightgbm",
        "matplotlib",
        "obstore",
        "pydantic",
        "ray",
        "safetensors",
        "scikit-learn",
        "tensorboardx",
    ),
    *("torch", "torchvision", "xgboost", "xgboost-cpu"),
)
"""The distributions that the training program imports."""

WITH_EXTRAS = "ray"
"""The distribution whose optional requirements count as well, where they are installed."""

OWN = frozenset(("trainyard", "trainyard_trainer"))


class CodeFinder(MetaPathFinder):
    """Finds the modules in folders of the user's code, unless their name is reserved."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = [*folders]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None:
            return None  # A submodule is found by its package.
        spec = PathFinder.find_spec(name, self.folders)
        # A folder without __init__.py has no loader. As in Python, a package anywhere else precedes it.
        if spec is None or spec.loader is None or is_reserved(name):
            return None
        return spec


def install(folders: Sequence[str]) -> None:
    """Make the modules in these folders importable in this process.

    The folders are also at the end of `sys.path`, from which processes of `multiprocessing` take theirs.
    """
    if not {*folders} <= {*installed()}:
        sys.meta_path.insert(0, CodeFinder(folders))
    sys.path.extend(folder for folder in folders if folder not in sys.path)


class Imports:
    """What makes the user's modules importable in the process that unpickles it.

    Pickled before an object of such a module, it is read before it.
    """

    def __reduce__(self) -> tuple[Callable[[Sequence[str]], Imports], tuple[list[str]]]:
        return _install_imports, (installed(),)


def _install_imports(folders: Sequence[str]) -> Imports:
    install(folders)
    return Imports()


def installed() -> list[str]:
    """Return the folders of the user's code whose modules are importable in this process."""
    finders = [each for each in sys.meta_path if isinstance(each, CodeFinder)]
    return [folder for finder in finders for folder in finder.folders]


def is_reserved(name: str) -> bool:
    """Return whether a module of the user's code cannot have this name."""
    if name in OWN or name in sys.stdlib_module_names:
        return True
    # Most names are those of no installed module, and it takes long to collect those of the dependencies.
    return _is_installed(name) and name in _names_of_dependencies()


def reserved_in(folder: Path) -> list[str]:
    """Return the files and folders of the user's code whose names are reserved."""
    modules = (
        path
        for path in folder.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    )
    return sorted(path.name for path in modules if is_reserved(path.stem))


def _is_installed(name: str) -> bool:
    """Return whether there is a module of this name outside of the user's code."""
    own = {*installed()}
    return PathFinder.find_spec(name, [each for each in sys.path if each not in own]) is not None


@cache
def _names_of_dependencies() -> frozenset[str]:
    """Return the top-level modules of the dependencies and of all that they depend on, as installed."""
    distributions: set[str] = set()
    pending = [*DEPENDENCIES]
    while pending:
        distribution = _normalised(pending.pop())
        if distribution in distributions:
            continue
        distributions.add(distribution)
        try:
            requirements = metadata.requires(distribution) or []
        except metadata.PackageNotFoundError:
            continue  # A requirement of another platform or of an extra.
        for requirement in requirements:  # such as "numpy>=2; extra == 'data'"
            name = re.match(r"[\w.-]+", requirement)
            if name is not None and (distribution == WITH_EXTRAS or "extra ==" not in requirement):
                pending.append(name[0])
    return frozenset(
        name
        for name, owners in metadata.packages_distributions().items()
        if any(_normalised(owner) in distributions for owner in owners)
    )


def _normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
