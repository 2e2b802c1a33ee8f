"""The commands of `trainyard`: load, call, show. Heavy imports stay inside, so `--help` is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.commands import (
    check,
    diff,
    explain,
    files,
    gpus,
    inside,
    look,
    platform,
    run_file,
    runs,
    steer,
    tools,
    train,
)


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


app = typer.Typer(name="trainyard", add_completion=False, rich_markup_mode=None)


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


for command in (
    run_file.plan,
    run_file.render,
    check.check,
    diff.diff,
    gpus.gpus,
    files.init,
    files.schema,
    runs.submit,
    runs.watch,
    look.status,
    look.logs,
    steer.stop,
    steer.suspend,
    steer.resume,
    steer.delete,
    inside.dashboard,
    inside.shell,
    inside.cp,
    explain.explain,
    explain.preflight,
    train.train,
    tools.predict,
):
    app.command()(command)
app.command("list")(look.list_runs)

app.add_typer(
    _group(
        "What the chart publishes in a namespace.",
        get=platform.platform_get,
        diff=platform.platform_diff,
    ),
    name="platform",
)
app.add_typer(
    _group(
        "Look at the checkpoints of a run, clear them up, and take a model out.",
        ls=tools.checkpoints_ls,
        verify=tools.checkpoints_verify,
        prune=tools.checkpoints_prune,
        export=tools.checkpoints_export,
    ),
    name="checkpoints",
)
app.add_typer(
    _group(
        "Convert images to Parquet, and look at them.",
        prepare=tools.data_prepare,
        inspect=tools.data_inspect,
    ),
    name="data",
)
