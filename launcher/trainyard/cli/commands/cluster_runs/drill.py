"""The command `drill`: inject a fault into a run on a cluster, and measure what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from trainyard.cli.commands.cluster_runs.drill_jobs import job_of
from trainyard.cli.options import (
    NAMESPACE,
    Context,
    Gpus,
    Json,
    Namespace,
    PlatformFile,
    Settings,
    Workers,
    open_cluster_to_change,
    platform_of,
    print_json,
)

if TYPE_CHECKING:
    from trainyard.drills.drill_run import DrillJob

RANDOM = "random"


def drill(
    scenario: Annotated[
        Optional[str],
        typer.Argument(metavar="SCENARIO", help="The fault; --list shows all faults."),
    ] = None,
    run_file: Annotated[
        Optional[Path],
        typer.Argument(metavar="RUN.yaml", help="The run file; a small run is enough."),
    ] = None,
    settings: Settings = None,
    gpus: Gpus = None,
    workers: Workers = None,
    platform_file: PlatformFile = None,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
    at_step: Annotated[
        str,
        typer.Option(metavar="N", help="The step at which the fault is injected, or `random`."),
    ] = RANDOM,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the folder of the drill's run.")
    ] = False,
    list_all: Annotated[
        bool, typer.Option("--list", help="List the scenarios with the rights that each needs.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Submit a run, inject a fault, and report what the fault cost; exit 1 if it exceeds the bounds."""
    from trainyard.cli import show
    from trainyard.drills.drill import run_drill
    from trainyard.drills.final_errors import FINAL_ERRORS, run_final_error
    from trainyard.drills.scenarios import SCENARIOS
    from trainyard.drills.undisturbed import UNDISTURBED, train_undisturbed
    from trainyard.errors import ConfigError

    if list_all:
        _list(as_json)
        return 0
    if scenario is None or run_file is None:
        raise ConfigError(
            "SCENARIO and RUN.yaml are needed", "`trainyard drill --list` shows scenarios."
        )
    _require_scenario(scenario, at_step)
    wanted = SCENARIOS.get(scenario) or FINAL_ERRORS[scenario]
    cluster = open_cluster_to_change(namespace, context)
    platform = platform_of(platform_file, platform_file is None, namespace, cluster)

    def job(word: str) -> DrillJob:
        # An error of the run file itself comes last: nothing may replace it.
        own, given = wanted.settings, settings or ()
        ordered = [*given, *own] if scenario in FINAL_ERRORS else [*own, *given]
        return job_of(run_file, ordered, gpus, workers, word, platform, namespace)

    if scenario in FINAL_ERRORS:
        error = FINAL_ERRORS[scenario]
        cost = run_final_error(cluster, platform, job(scenario), error, keep=keep, say=show.say)
        if as_json:
            print_json(cost.to_json())
        else:
            show.final_error_table(cost)
        return 0 if cost.is_passed else 1

    weights = train_undisturbed(cluster, platform, job(UNDISTURBED), show.say)
    report = run_drill(
        cluster,
        platform,
        job(scenario),
        SCENARIOS[scenario],
        weights=weights,
        at_step=None if at_step == RANDOM else int(at_step),
        keep=keep,
        say=show.say,
    )
    if as_json:
        print_json(report.to_json())
    else:
        show.drill_table(report)
    return 0 if report.is_passed else 1


def _require_scenario(scenario: str, at_step: str) -> None:
    """Raise ConfigError if there is no such scenario, or if it cannot inject its fault at that step."""
    from trainyard.drills.final_errors import FINAL_ERRORS
    from trainyard.drills.scenarios import SCENARIOS
    from trainyard.errors import ConfigError

    known = [*SCENARIOS, *FINAL_ERRORS]
    if scenario not in known:
        raise ConfigError(f"there is no scenario {scenario}", f"There are: {', '.join(known)}.")
    if at_step != RANDOM and not (at_step.isdecimal() and int(at_step) > 0):
        raise ConfigError(f"--at-step = {at_step}: must be a step from 1 on, or {RANDOM}")
    if scenario in FINAL_ERRORS and at_step != RANDOM:
        raise ConfigError(f"--at-step = {at_step}: {scenario} injects no fault at a step")


def _list(as_json: bool) -> None:
    from trainyard.cli import show
    from trainyard.drills.final_errors import ACTOR, ANSWER, FINAL_ERRORS
    from trainyard.drills.scenarios import LAUNCHER_ROLE, SCENARIOS

    rows = [
        {
            "scenario": each.name,
            "what happens": each.fault,
            "and then": each.answer,
            "who acts": each.actor,
            "needs": each.rights,
        }
        for each in SCENARIOS.values()
    ]
    rows += [
        {
            "scenario": error.name,
            "what happens": error.fault,
            "and then": ANSWER,
            "who acts": ACTOR,
            "needs": LAUNCHER_ROLE,
        }
        for error in FINAL_ERRORS.values()
    ]
    if as_json:
        print_json(rows)
    else:
        show.table(list(rows[0]), [list(row.values()) for row in rows])
