"""The commands `warm up`, `warm status` and `warm down`: a Ray on this machine that is ready for runs."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.options import Json
from trainyard_trainer.run_files import exit_codes
from trainyard_trainer.run_files.sizes import size_text

if TYPE_CHECKING:
    from trainyard.local.warm.greeting import WarmState

IDLE_MINUTES = 15.0


def up(
    idle_minutes: Annotated[
        float,
        typer.Option(
            "--idle-minutes",
            metavar="MINUTES",
            min=0.01,
            help="End it after so long without a run.",
        ),
    ] = IDLE_MINUTES,
) -> None:
    """Start a Ray on this machine that is ready for the next runs, whose first step then comes sooner."""
    from trainyard.local.tools import require_packages
    from trainyard.local.training import NEEDED
    from trainyard.local.warm.control import up as start_warm

    require_packages(NEEDED, "a warm Ray")
    began = time.monotonic()
    state = start_warm(idle_minutes * 60)
    typer.echo(f"{_state_text(state)} ({time.monotonic() - began:.1f} s)")


def status(as_json: Json = False) -> None:
    """Print whether a warm Ray is ready, and for how long; exit code 1 if none can be used."""
    from trainyard.local.warm.control import memory_bytes
    from trainyard.local.warm.control import status as read_status

    found = read_status()
    if found is None:
        typer.echo("null" if as_json else "there is no warm Ray: `trainyard warm up` starts one")
        raise typer.Exit(exit_codes.FAILED)
    state, different = found
    memory = memory_bytes(state.pid)
    if as_json:
        record = asdict(state) | {"memory_bytes": memory, "difference": different}
        typer.echo(json.dumps(record, indent=2))
    else:
        typer.echo(f"{_state_text(state)}; {size_text(memory)} of memory")
        if different:
            typer.echo(
                f"runs do not use it: {different} is not the same as when it was started. "
                "`trainyard warm up` replaces it"
            )
    if different:
        raise typer.Exit(exit_codes.FAILED)


def down() -> None:
    """End the warm Ray; runs that go on are not ended."""
    from trainyard.local.warm.control import down as end_warm

    typer.echo("the warm Ray has ended" if end_warm() else "there was no warm Ray")


def _state_text(state: WarmState) -> str:
    """Return one line that says how the warm process stands."""
    ready = "is ready" if state.is_ready else "starts" if state.is_prepared else "is not prepared"
    runs = (
        f"{state.running} of {state.runs} runs go on"
        if state.running
        else f"{state.runs} runs so far"
    )
    ends = "" if state.left_s is None else f", ends in {state.left_s / 60:.1f} min without a run"
    return f"warm process {state.pid}: a Ray with {state.cpus} CPUs {ready}; {runs}{ends}"
