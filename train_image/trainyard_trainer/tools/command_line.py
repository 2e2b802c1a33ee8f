"""What the command-line tools share: arguments, the folder of a run, errors and exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from trainyard_trainer import front_end
from trainyard_trainer.config.tools.arguments import Tool, ValueKind
from trainyard_trainer.errors import ConfigError, TrainerError
from trainyard_trainer.run_files.exit_codes import DETACHED, WRONG_INPUT
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors look like all other errors: `error: ...`, without the usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(WRONG_INPUT, f"error: {message}\n")


def parse(arguments: Sequence[str] | None, *tools: Tool) -> tuple[Tool, argparse.Namespace]:
    """Parse a command line: the tool that it names, and its arguments by key.

    Several tools are the commands of one module; a single one has no command. Ends the process with exit
    code 2 if the arguments are wrong.
    """
    parser = Parser(prog=f"python -m trainyard_trainer.tools.{tools[0].module}")
    if len(tools) == 1:
        _add_arguments(parser, tools[0])
    else:
        commands = parser.add_subparsers(
            required=True, metavar=" | ".join(tool.command or "" for tool in tools)
        )
        for tool in tools:
            assert tool.command is not None
            _add_arguments(commands.add_parser(tool.command, help=tool.help), tool)
    given = vars(parser.parse_args(arguments))
    found: Tool = given.pop("tool")
    if problem := found.problem(given):
        parser.error(problem)
    defaults = {
        argument.key: False if argument.kind is None else argument.default
        for argument in found.arguments
    }
    return found, argparse.Namespace(**defaults | given)


def _add_arguments(parser: argparse.ArgumentParser, tool: Tool) -> None:
    parser.set_defaults(tool=tool)
    for argument in tool.arguments:
        options: dict[str, Any] = {"help": argument.full_help.replace("%", "%%")}
        if argument.is_option:
            options |= {"default": argparse.SUPPRESS, "required": argument.is_required}
        if argument.kind is None:
            options |= {"action": "store_true"}
        else:
            options |= {"metavar": argument.metavar, "type": _checked(argument.kind)}
        if argument.is_repeated:
            options |= {"nargs": "*", "default": argparse.SUPPRESS}
        parser.add_argument(argument.name, **options)


def _checked(kind: ValueKind) -> Callable[[str], Any]:
    def checked(text: str) -> Any:
        try:
            return kind.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def exit_code_of(main: Callable[[], int]) -> int:
    """Run a tool and return its exit code; print its error in a few lines, without a traceback.

    The tool ends as at Ctrl-C when the command that started it is gone.
    """
    front_end.watch(front_end.interrupt)
    try:
        return main()
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return DETACHED


def open_run(run: str, storage: str, endpoint: str | None) -> RunFolder:
    """Return the folder of an existing run, given by its name in the storage or by a path with a slash.

    Raises ConfigError if there is no such run, or if it has neither checkpoints nor a model.
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
