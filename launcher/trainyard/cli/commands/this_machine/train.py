"""The command that trains on this machine."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from trainyard.cli.options import Fresh, Gpus, Name, RunFile, Settings, Workers, load_run
from trainyard.cli.progress import show_progress


def train(
    run_file: RunFile,
    storage: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the folders of runs lie.")
    ] = Path("runs"),
    settings: Settings = None,
    gpus: Gpus = None,
    workers: Workers = None,
    name: Name = None,
    fresh: Fresh = False,
    without_ray: Annotated[
        bool, typer.Option("--without-ray", help="In one process: a baseline for Ray.")
    ] = False,
    torchrun: Annotated[
        bool, typer.Option("--torchrun", help="Under torchrun, plain DDP: another baseline.")
    ] = False,
) -> None:
    """Train on this machine, on a Ray of its own; a run that was there before goes on."""
    from trainyard.cli import show
    from trainyard.errors import ConfigError
    from trainyard.local.training import Starter, local_config, set_aside, train_locally
    from trainyard.planning.objects import pack_code

    if without_ray and torchrun:
        raise ConfigError(
            "--without-ray and --torchrun exclude each other: one process, or several"
        )
    starter: Starter = "alone" if without_ray else "torchrun" if torchrun else "ray"
    run = load_run(run_file, settings, gpus, workers, name)
    try:
        code = pack_code(run, None)
        config = local_config(run, storage, os.cpu_count() or 1, starter, code)
        if fresh:
            show.set_aside(run.name, set_aside(config))
        with closing(train_locally(config, starter, code)) as statuses:
            last = show_progress(statuses)
    except KeyboardInterrupt:
        show.say(
            f"run {run.name} was interrupted: the same command goes on from its last checkpoint"
        )
        raise
    if last.summary is not None:
        typer.echo(show.summary_text(last.summary))
