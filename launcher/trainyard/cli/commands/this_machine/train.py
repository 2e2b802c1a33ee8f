"""The command `train`: train a run on this machine."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Annotated

import typer

from trainyard.cli.options import (
    RUNS,
    Fresh,
    Gpus,
    LocalStorage,
    Name,
    RunFile,
    Settings,
    Workers,
    load_run_with_options,
)
from trainyard.cli.progress import show_progress
from trainyard.cli.record_lines import summary_text


def train(
    run_file: RunFile,
    storage: LocalStorage = RUNS,
    settings: Settings = None,
    gpus: Gpus = None,
    workers: Workers = None,
    name: Name = None,
    fresh: Fresh = False,
    without_ray: Annotated[
        bool, typer.Option("--without-ray", help="Train in one process without Ray, as a baseline.")
    ] = False,
    torchrun: Annotated[
        bool,
        typer.Option(
            "--torchrun", help="Start the workers by torchrun, with plain DDP, as another baseline."
        ),
    ] = False,
) -> None:
    """Train a run on this machine with a local Ray; a run that was interrupted resumes."""
    from trainyard.cli import show
    from trainyard.errors import ConfigError
    from trainyard.local.training import (
        Starter,
        local_config,
        set_aside_locally,
        train_locally,
    )
    from trainyard.planning.objects import pack_code
    from trainyard.run_file.code.source import source_of

    if without_ray and torchrun:
        raise ConfigError(
            "--without-ray and --torchrun exclude each other: one process, or several"
        )
    starter: Starter = "alone" if without_ray else "torchrun" if torchrun else "ray"
    run = load_run_with_options(run_file, settings, gpus, workers, name)
    try:
        code = pack_code(run, None)
        config = local_config(run, storage, os.cpu_count() or 1, starter, code)
        if fresh:
            show.say_set_aside(run.name, set_aside_locally(config, show.say))
        with closing(train_locally(config, starter, code, source_of(run, run_file))) as statuses:
            last = show_progress(statuses)
    except KeyboardInterrupt:
        show.say(
            f"run {run.name} was interrupted: the same command resumes it from its last checkpoint"
        )
        raise
    if last.summary is not None:
        typer.echo(summary_text(last.summary))
