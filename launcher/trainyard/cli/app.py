"""The commands of `trainyard`: load, call, show. Heavy imports stay inside, so `--help` is quick."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trainyard.cli import tools
from trainyard.cli.commands.cluster_runs import control, diagnose, drill, reproduce, submit, sweep
from trainyard.cli.commands.inspection import gpus, platform, pods, runs
from trainyard.cli.commands.run_files import check, diff, new_file, plan
from trainyard.cli.commands.this_machine import compare, train
from trainyard_trainer.config import tool_arguments


def _group(help_text: str, **commands: object) -> typer.Typer:
    """Commands under one word, which alone prints their help."""
    group = typer.Typer(rich_markup_mode=None, help=help_text)

    @group.callback(invoke_without_command=True)
    def alone(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    for name, command in commands.items():
        group.command(name)(command)  # type: ignore[type-var]
    return group


SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "A run file": {
        "init": new_file.init,
        "plan": plan.plan,
        "render": plan.render,
        "check": check.check,
        "diff": diff.diff,
        "schema": new_file.schema,
    },
    "A run on a cluster": {
        "preflight": diagnose.preflight,
        "submit": submit.submit,
        "sweep": sweep.sweep,
        "watch": submit.watch,
        "explain": diagnose.explain,
        "stop": control.stop,
        "suspend": control.suspend,
        "resume": control.resume,
        "delete": control.delete,
        "drill": drill.drill,
        "soak": drill.soak,
        "reproduce": reproduce.reproduce,
    },
    "What is there": {
        "list": runs.list_runs,
        "status": runs.status,
        "logs": runs.logs,
        "gpus": gpus.gpus,
        "dashboard": pods.dashboard,
        "shell": pods.shell,
        "cp": pods.cp,
        "platform": _group(
            "What the chart publishes in a namespace.",
            get=platform.platform_get,
            diff=platform.platform_diff,
        ),
    },
    "On this machine": {
        "train": train.train,
        "data": _group(
            "Convert images to Parquet, and look at them.",
            prepare=tools.command_of(tool_arguments.DATA_PREPARE),
            inspect=tools.command_of(tool_arguments.DATA_INSPECT),
        ),
        "checkpoints": _group(
            "Look at the checkpoints of a run, clear them up, and take a model out.",
            ls=tools.command_of(tool_arguments.CHECKPOINTS_LS),
            verify=tools.command_of(tool_arguments.CHECKPOINTS_VERIFY),
            prune=tools.command_of(tool_arguments.CHECKPOINTS_PRUNE),
            export=tools.command_of(tool_arguments.CHECKPOINTS_EXPORT),
        ),
        "predict": tools.command_of(tool_arguments.PREDICT),
        "compare": compare.compare,
    },
}
"""All commands, in the order in which people meet them."""


class Sections(TyperGroup):
    """Lists the commands under their headings, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, section in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(name, self.commands[name].get_short_help_str(1000)) for name in section]
                )


app = typer.Typer(name="trainyard", cls=Sections, add_completion=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the whole traceback of an error.")
    ] = False,
) -> None:
    """One run file in, a trained model out: on a laptop, and on a KubeRay GPU cluster."""
    # --traceback is read in __main__, which handles all errors.
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _section in SECTIONS.values():
    for _name, _command in _section.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name)
        else:
            app.command(_name)(_command)
