"""What the command-line tools share: arguments, the folder of a run, errors and exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from trainyard_trainer.errors import ConfigError, TrainerError
from trainyard_trainer.run_files.exit_codes import DETACHED, WRONG_INPUT
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem


class Arguments(argparse.ArgumentParser):
    """Refuses what was typed in the words of all other errors."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_INPUT, f"error: {message}\n")


def exit_code_of(main: Callable[[], int]) -> int:
    """Run a tool; what it cannot do is told in a few lines, without a traceback."""
    try:
        return main()
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: the storage cannot be used: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return DETACHED


def add_run(parser: argparse.ArgumentParser) -> None:
    """The arguments of `open_run`, for the command line of a tool."""
    parser.add_argument("run", help="the run's name, or its folder's path with a slash in it")
    parser.add_argument("--storage", default="runs", help="where the folders of runs lie")
    parser.add_argument("--endpoint", help="address of an S3 server that is not AWS")


def open_run(run: str, storage: str, endpoint: str | None) -> RunFolder:
    """The folder of a run that is there: named below the storage, or by a path with a slash in it.

    Raises ConfigError.
    """
    is_path = "/" in run
    folder = (
        RunFolder(*open_filesystem(run, endpoint))
        if is_path
        else RunFolder.open(storage, run, endpoint)
    )
    if folder.exists(folder.checkpoints) or folder.exists(folder.model):
        return folder
    if folder.exists(folder.root):
        raise ConfigError(f"{folder.show(folder.root)} holds neither checkpoints nor a model.")
    above, _, name = folder.root.rpartition("/")
    others = folder.subfolders(above)
    raise ConfigError(
        f"there is no run {name} in {folder.show(above)}.\n       "
        + (
            f"Runs there: {', '.join(others)}."
            if others
            else "Name its storage with --storage DIR."
        )
    )
