"""The command `dev`: train a run on this machine, and start it again when its file or its code changes."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Annotated

import typer

from trainyard.cli.options import (
    RUNS,
    LocalStorage,
    Name,
    RunFile,
    Settings,
    Workers,
    load_run_with_options,
)
from trainyard.cli.progress import show_progress
from trainyard.cli.record_lines import summary_text


def dev(
    run_file: RunFile,
    storage: LocalStorage = RUNS,
    settings: Settings = None,
    workers: Workers = None,
    name: Name = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Train from scratch each time: set the run's folder aside first."
        ),
    ] = False,
) -> None:
    """Train a run on this machine, and again from its last checkpoint whenever its file or code changes."""
    from trainyard.cli import show
    from trainyard.local.tools import require_packages
    from trainyard.local.training import NEEDED, local_config, set_aside_locally, train_locally

    require_packages((*NEEDED, "watchfiles"), "`dev`")
    from trainyard.local.development import RunVersion, develop
    from trainyard.planning.objects import pack_code
    from trainyard.run_file.code.source import source_of

    def load() -> RunVersion:
        run = load_run_with_options(run_file, settings, None, workers, name)
        code = pack_code(run, None)
        config = local_config(run, storage, os.cpu_count() or 1, code=code)
        return RunVersion(run=run, config=config, code=code)

    def train(version: RunVersion) -> None:
        if fresh:
            show.say_set_aside(version.run.name, set_aside_locally(version.config, show.say))
        source = source_of(version.run, run_file)
        statuses = train_locally(version.config, "ray", version.code, source)
        with closing(statuses):
            last = show_progress(statuses)
        if last.summary is not None:
            typer.echo(summary_text(last.summary))

    develop(run_file.resolve(), storage.resolve(), load, train, show.say)
