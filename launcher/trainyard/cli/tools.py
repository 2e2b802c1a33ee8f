"""Commands about data, checkpoints and models: programs of the trainer, on a run's folder.

Each command is built from its tool's definition in `trainyard_trainer.config.tools`, so that
names, defaults, rules and help texts exist once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Optional

import typer
from typer.models import ParameterInfo

from trainyard.cli.options import run_name
from trainyard_trainer.config.tools.arguments import Argument, Tool
from trainyard_trainer.config.tools.prediction_tool import PREDICT, uses_ray
from trainyard_trainer.config.tools.run_tools import PLOT
from trainyard_trainer.config.tools.shared_arguments import ENDPOINT, RUN, STORAGE

_RUN_HELP = "The run's name, its run file, or the path of its folder."
"""Replaces the tools' own help: only the launcher knows run files."""


def _checked(argument: Argument) -> Callable[[str], str]:
    """Return a function that refuses what the tool would refuse, and else returns the text as it is."""

    def checked(text: str) -> str:
        assert argument.kind is not None
        try:
            argument.kind.parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return text

    return checked


def parameter(argument: Argument) -> Any:
    """Return what typer needs to know about a tool's argument, for `Annotated`."""
    if argument.kind is None:
        return typer.Option(argument.name, help=argument.full_help)
    declared: Callable[..., ParameterInfo] = typer.Option if argument.is_option else typer.Argument
    names = [argument.name] if argument.is_option else []
    help_text = _RUN_HELP if argument is RUN else argument.full_help
    return declared(*names, metavar=argument.metavar, help=help_text, parser=_checked(argument))


AnyRun = Annotated[str, typer.Argument(metavar="RUN", help=_RUN_HELP)]
Storage = Annotated[Optional[str], parameter(STORAGE)]
Endpoint = Annotated[Optional[str], parameter(ENDPOINT)]
Plot = Annotated[Optional[str], parameter(PLOT)]


def command_of(tool: Tool) -> Callable[..., None]:
    """Build the command that runs a tool: its parameters are the tool's arguments."""

    def command(**values: Any) -> None:
        given = {
            argument: values[argument.key]
            for argument in tool.arguments
            if values[argument.key] not in (None, False, [])
        }
        _run(tool, given)

    parameters = [
        inspect.Parameter(
            argument.key,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Annotated[_type_of(argument), parameter(argument)],
            default=inspect.Parameter.empty if argument.is_required else _absent(argument),
        )
        for argument in tool.arguments
    ]
    command.__doc__ = tool.help
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _run(tool: Tool, given: dict[Argument, Any]) -> None:
    """Run a tool with the arguments that were typed, and end with its exit code."""
    from trainyard.errors import ConfigError
    from trainyard.local.tools import require_packages, run_tool

    problem = tool.problem({argument.key: value for argument, value in given.items()})
    if problem is not None:
        raise ConfigError(problem)
    if tool is PREDICT and uses_ray({each.key for each in given}):
        require_packages(["ray", "obstore"], "`predict` with a data set")
    options: list[str] = []
    words: list[str] = []
    for argument, value in given.items():
        if argument.kind is None:
            options.append(argument.name)
        elif argument.is_option:
            options.append(f"{argument.name}={value}")
        elif argument is RUN:
            words.append(any_run(value))
        else:
            words += value if argument.is_repeated else [value]
    command = [tool.command] if tool.command else []
    raise typer.Exit(run_tool(tool.module, [*command, *options, "--", *words]))


def _type_of(argument: Argument) -> Any:
    if argument.kind is None:
        return bool
    if argument.is_repeated:
        return Optional[list[str]]
    return str if argument.is_required else Optional[str]


def _absent(argument: Argument) -> Any:
    return False if argument.kind is None else None


def any_run(run: str) -> str:
    """Return a run's name, given as itself or as its run file; or the path of its folder unchanged."""
    return run if "/" in run and not run.endswith((".yaml", ".yml")) else run_name(run)
