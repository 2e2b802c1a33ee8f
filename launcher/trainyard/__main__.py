"""The command `trainyard`: one error handler, and the exit codes.

0 succeeded; 1 the run failed or was stopped; 2 your input is wrong; 3 the cluster refused or
cannot be reached; 130 detached by Ctrl-C.
"""

from __future__ import annotations

import sys
import traceback

import typer
from typer.exceptions import TyperException

from trainyard.cli.app import app
from trainyard.errors import LauncherError
from trainyard_trainer.run_files import exit_codes

PROGRAM = "trainyard"
TRACEBACK = "--traceback"


BARE = {"--dry-run": "--dry-run=client"}
"""An option of `submit` whose value may be left out, which typer does not know."""


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Exit code of a command line. --traceback, at any place in it, shows an error's traceback too."""
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
    """What is ours, and what belongs to a command that runs elsewhere."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end:]


if __name__ == "__main__":
    main()
