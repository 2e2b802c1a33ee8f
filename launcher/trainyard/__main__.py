"""The program `trainyard`: run a command line, print its error, and exit with its code.

The exit codes are in `trainyard_trainer.run_files.exit_codes`.
"""

from __future__ import annotations

import trainyard_trainer.run_files.programs.without_user_folders  # first # noqa: F401

# isort: split
import sys
import traceback

import typer
from typer.exceptions import TyperException

from trainyard.cli.app import app
from trainyard.errors import LauncherError
from trainyard_trainer.run_files import exit_codes
from trainyard_trainer.run_files.programs.standard_streams import run_with_safe_streams

PROGRAM = "trainyard"
TRACEBACK = "--traceback"


BARE = {"--dry-run": "--dry-run=client"}
"""Options of `submit` whose value may be left out, and what they then mean; typer has no such options."""


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run_with_safe_streams(lambda: run(sys.argv[1:])))


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code.

    `--traceback` anywhere in it prints the traceback of an error, too.
    """
    own, rest = _until_dashes(arguments)
    command = [argument for argument in own if argument != TRACEBACK] + rest
    if command[:1] == ["submit"]:
        command = [BARE.get(argument, argument) for argument in command]
    try:
        code = app(command, prog_name=PROGRAM, standalone_mode=False)
    except LauncherError as error:
        if TRACEBACK in own:
            traceback.print_exc()
        print(error, file=sys.stderr)
        return error.exit_code
    except TyperException as error:
        print(f"error: {error.format_message()}", file=sys.stderr)
        print("       `trainyard COMMAND --help` lists what a command takes.", file=sys.stderr)
        return exit_codes.WRONG_INPUT
    except (KeyboardInterrupt, typer.Abort):
        return exit_codes.DETACHED
    return code if isinstance(code, int) else exit_codes.SUCCEEDED


def _until_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Divide arguments at `--`: what follows belongs to a command that runs in a pod."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end:]


if __name__ == "__main__":
    main()
