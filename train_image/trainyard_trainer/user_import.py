"""Import the user's functions and classes, and tell errors of the user's code with their file and line."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainyard_trainer.errors import ConfigError, TrainerError
from trainyard_trainer.run_files.programs import code_imports

PACKAGE = str(Path(__file__).parent)
"""The folder of this package, whose frames in a traceback are not the user's."""


def import_reference(name: str, key: str) -> Any:
    """Import the object that `module:name` names. `key` is the key of the run file for error messages.

    Raises ConfigError if the module or the object does not exist. Errors of the module itself are raised as
    they are.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{key} = {name}: module {error.name} exists neither in the folder that `code` names "
                "nor in the image"
            ) from None
        raise
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{key} = {name}: module {module} has no {path}")
        found = getattr(found, part)
    return found


@contextmanager
def user_errors(doing: str) -> Iterator[None]:
    """Turn every error of the user's code into ConfigError with its file and line.

    `doing` says in the message what failed, such as `train.recipe = my:Recipe: build_model`.
    """
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"{doing} failed: {described(error)}") from error


def described(error: BaseException) -> str:
    """Return an error in one line, with the last file and line of the user's code that it passed.

    A file in a folder of the run's code is named by its path in this folder.
    """
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError):
        return text  # It names its file and line itself.
    place = place_in_user_code(error)
    return text if place is None else f"{text} ({place})"


def place_in_user_code(error: BaseException) -> str | None:
    """Return the last file, line and function of the user's code that an error passed; None without one."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if is_users_file(frame.filename)]
    if not users:
        return None
    frame = users[-1]
    return f"{shown_file(frame.filename)}, line {frame.lineno}, in {frame.name}"


def shown_file(file: str) -> str:
    """Return the path of a file for a message: in the folder of the run's code if it is there."""
    for folder in code_imports.installed():
        if Path(file).is_relative_to(folder):
            return str(Path(file).relative_to(folder))
    return file


def is_users_file(file: str) -> bool:
    """Return whether the file of a frame is neither this package's nor an installed library's."""
    is_library = "/site-packages/" in file or "/dist-packages/" in file or "/lib/python3" in file
    return not (is_library or file.startswith((PACKAGE, "<frozen ")))
