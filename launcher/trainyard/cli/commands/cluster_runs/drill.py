"""The commands `drill` and `soak`: inject faults into a run on a cluster, and measure what they cost."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from trainyard.cli.options import (
    NAMESPACE,
    Context,
    Gpus,
    Json,
    Namespace,
    PlatformFile,
    RunFile,
    Settings,
    Workers,
    load_run_with_options,
    local_path,
    objects_with_warnings,
    open_cluster_to_change,
    platform_of,
    print_json,
)

if TYPE_CHECKING:
    from trainyard.drills.drill_run import DrillJob
    from trainyard.drills.soak_report import SoakReport
    from trainyard.platform import Platform
    from trainyard.run_file.models import NetworkRun, RunConfig

RANDOM = "random"
SEEDS = 1_000_000


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


def soak(
    run_file: RunFile,
    minutes: Annotated[
        float, typer.Option(metavar="M", min=1, help="For how many minutes faults are injected.")
    ],
    settings: Settings = None,
    gpus: Gpus = None,
    workers: Workers = None,
    platform_file: PlatformFile = None,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
    seed: Annotated[
        Optional[int],
        typer.Option(
            metavar="N",
            help="The seed for the order and the times of the faults.  [default: random]",
        ),
    ] = None,
    is_beside: Annotated[
        bool,
        typer.Option(
            "--beside",
            help="Train the undisturbed run at the same time, which takes as many resources again.",
        ),
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the folder of the soak's run.")
    ] = False,
    report_file: Annotated[
        Optional[Path],
        typer.Option(
            "--report",
            metavar="FILE",
            parser=local_path,
            help="Write the report as JSON: a first time before the weights are compared, then completely.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Submit a run and inject a fault every 1 to 3 minutes; exit 1 if weights or sizes show it.

    The run trains in rounds of as many epochs as the run file says, for as long as the soak lasts.
    """
    from trainyard.cli import show
    from trainyard.drills.soak import SETTINGS, soak_run
    from trainyard.errors import ConfigError

    run = _recipe_of(load_run_with_options(run_file, settings, gpus, workers, None))
    if run.resources.is_elastic:
        raise ConfigError(
            f"run {run.name} is elastic: a soak compares weights, and those of an elastic run depend on how "
            "many workers it had at each step",
            f"Give it one number of {run.resources.unit} (--{run.resources.unit} N).",
        )
    cluster = open_cluster_to_change(namespace, context)
    platform = platform_of(platform_file, platform_file is None, namespace, cluster)
    epochs = run.train.epochs

    def job(word: str, so_many: int) -> DrillJob:
        own = [*(settings or ()), *SETTINGS, f"train.epochs={so_many}"]
        return job_of(run_file, own, gpus, workers, word, platform, namespace)

    def write(report: SoakReport) -> None:
        if report_file is not None:
            report_file.write_text(json.dumps(report.to_json(), indent=2) + "\n")

    report = soak_run(
        cluster,
        platform,
        job,
        epochs=epochs,
        minutes=minutes,
        seed=secrets.randbelow(SEEDS) if seed is None else seed,
        is_beside=is_beside,
        keep=keep,
        say=show.say,
        known=write,
    )
    write(report)
    if as_json:
        print_json(report.to_json())
    else:
        show.soak_table(report)
    return 0 if report.is_passed else 1


def job_of(
    run_file: Path,
    settings: list[str],
    gpus: str | None,
    workers: str | None,
    word: str,
    platform: Platform,
    namespace: str,
) -> DrillJob:
    """Return the run file's run under a name for drills, planned and rendered."""
    from trainyard.drills.drill import SETTINGS, drill_name
    from trainyard.drills.drill_run import DrillJob
    from trainyard_trainer.config.trainer_config import TrainerConfig

    # Other runs have no such settings: they are refused for what they are.
    name = drill_name(
        _recipe_of(load_run_with_options(run_file, settings, gpus, workers, None)).name, word
    )
    run = _recipe_of(load_run_with_options(run_file, [*SETTINGS, *settings], gpus, workers, name))
    objects = objects_with_warnings(run, platform, namespace)
    assert isinstance(objects.plan.trainer, TrainerConfig)
    return DrillJob(run=name, config=objects.plan.trainer, rayjob=objects.job)


def _recipe_of(run: RunConfig) -> NetworkRun:
    """Return the run as a recipe run with a RayCluster of its own.

    Raises ConfigError for user code, for gradient boosting, and for a run on a standing RayCluster.
    """
    from trainyard.errors import ConfigError
    from trainyard.run_file.models import BoostingRun, NetworkRun

    if not isinstance(run, NetworkRun):
        what = "trains no network" if isinstance(run, BoostingRun) else "runs user code"
        raise ConfigError(
            f"run {run.name} {what}: a drill compares weights, so it needs a recipe that trains a network",
            "Use examples/digits.yaml: the result says the same about the cluster.",
        )
    if run.resources.cluster is not None:
        raise ConfigError(
            f"resources.cluster = {run.resources.cluster}: a drill strikes pods, which other runs use there",
            "Leave resources.cluster out.",
        )
    return run


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
