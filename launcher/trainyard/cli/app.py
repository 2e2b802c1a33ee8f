"""The table of all commands, and the typer application that is made from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trainyard.cli import tools
from trainyard.cli.commands.cluster_runs import (
    control,
    diagnose,
    drill,
    reproduce,
    soak,
    submit,
    sweep,
)
from trainyard.cli.commands.inspection import gpus, logs, platform, pods, runs
from trainyard.cli.commands.run_files import check, diff, new_file, plan, recipe
from trainyard.cli.commands.this_machine import compare, dev, train, verify, warm
from trainyard_trainer.config.tools.checkpoint_tools import (
    CHECKPOINTS_EXPORT,
    CHECKPOINTS_LS,
    CHECKPOINTS_PRUNE,
    CHECKPOINTS_VERIFY,
)
from trainyard_trainer.config.tools.data_tools import DATA_INSPECT, DATA_PREPARE, DATA_TOKENIZER
from trainyard_trainer.config.tools.prediction_tool import PREDICT


def _group(help_text: str, **commands: object) -> typer.Typer:
    """Return a command with subcommands; without a subcommand it prints its help."""
    group = typer.Typer(rich_markup_mode=None, help=help_text)

    @group.callback(invoke_without_command=True)
    def alone(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    for name, command in commands.items():
        group.command(name)(command)  # type: ignore[type-var]
    return group


SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "Run files": {
        "init": new_file.init,
        "plan": plan.plan,
        "render": plan.render,
        "check": check.check,
        "diff": diff.diff,
        "schema": new_file.schema,
        "recipe": _group("Work on a recipe of your own.", schema=recipe.schema),
    },
    "Runs on a cluster": {
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
        "soak": soak.soak,
        "reproduce": reproduce.reproduce,
    },
    "Inspect a cluster": {
        "list": runs.list_runs,
        "status": runs.status,
        "logs": logs.logs,
        "gpus": gpus.gpus,
        "dashboard": pods.dashboard,
        "shell": pods.shell,
        "debug": pods.debug,
        "cp": pods.cp,
        "platform": _group(
            "Print the platform that the chart has published in a namespace, or compare it.",
            get=platform.platform_get,
            diff=platform.platform_diff,
        ),
    },
    "Work on this machine": {
        "train": train.train,
        "dev": dev.dev,
        "warm": _group(
            "Keep a Ray ready on this machine, so that `train` starts within seconds.",
            up=warm.up,
            status=warm.status,
            down=warm.down,
        ),
        "verify": verify.verify,
        "data": _group(
            "Prepare data sets as Parquet files, inspect them, and train tokenizers.",
            prepare=tools.command_of(DATA_PREPARE),
            inspect=tools.command_of(DATA_INSPECT),
            tokenizer=tools.command_of(DATA_TOKENIZER),
        ),
        "checkpoints": _group(
            "List, verify, prune and export the checkpoints of a run.",
            ls=tools.command_of(CHECKPOINTS_LS),
            verify=tools.command_of(CHECKPOINTS_VERIFY),
            prune=tools.command_of(CHECKPOINTS_PRUNE),
            export=tools.command_of(CHECKPOINTS_EXPORT),
        ),
        "predict": tools.command_of(PREDICT),
        "compare": compare.compare,
    },
}
"""All commands by the group under which `trainyard --help` lists them."""


class Sections(TyperGroup):
    """A command group whose help lists the commands by `SECTIONS`, each with its whole first sentence."""

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
        bool, typer.Option("--traceback", help="Print the traceback of an error, too.")
    ] = False,
) -> None:
    """Train a model from one run file, on this machine or on a KubeRay cluster with GPUs."""
    # --traceback is read in __main__, which handles all errors.
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _section in SECTIONS.values():
    for _name, _command in _section.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name)
        else:
            app.command(_name)(_command)
