"""The command `soak`: inject one fault after the other into a run on a cluster, and compare its weights."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from trainyard.cli.commands.cluster_runs.drill_jobs import job_of, recipe_of
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
    open_cluster_to_change,
    platform_of,
    print_json,
)

if TYPE_CHECKING:
    from trainyard.drills.drill_run import DrillJob
    from trainyard.drills.soak_report import SoakReport

SEEDS = 1_000_000

Minutes = Annotated[
    float, typer.Option(metavar="M", min=1, help="For how many minutes faults are injected.")
]
Seed = Annotated[
    Optional[int],
    typer.Option(
        metavar="N", help="The seed for the order and the times of the faults.  [default: random]"
    ),
]
Beside = Annotated[
    bool,
    typer.Option(
        "--beside",
        help="Train the undisturbed run at the same time, which takes as many resources again.",
    ),
]
Keep = Annotated[bool, typer.Option("--keep", help="Keep the folder of the soak's run.")]
ReportFile = Annotated[
    Optional[Path],
    typer.Option(
        "--report",
        metavar="FILE",
        parser=local_path,
        help="Write the report as JSON: a first time before the weights are compared, then completely.",
    ),
]


def soak(
    run_file: RunFile,
    minutes: Minutes,
    settings: Settings = None,
    gpus: Gpus = None,
    workers: Workers = None,
    platform_file: PlatformFile = None,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
    seed: Seed = None,
    is_beside: Beside = False,
    keep: Keep = False,
    report_file: ReportFile = None,
    as_json: Json = False,
) -> int:
    """Submit a run and inject a fault every 1 to 3 minutes; exit 1 if weights or sizes show it.

    The run trains in rounds of as many epochs as the run file says, for as long as the soak lasts.
    """
    from trainyard.cli import show
    from trainyard.drills.soak import SETTINGS, SoakOptions, soak_run
    from trainyard.errors import ConfigError

    run = recipe_of(load_run_with_options(run_file, settings, gpus, workers, None))
    if run.resources.is_elastic:
        raise ConfigError(
            f"run {run.name} is elastic: a soak compares weights, and those of an elastic run depend on how "
            "many workers it had at each step",
            f"Give it one number of {run.resources.unit} (--{run.resources.unit} N).",
        )
    cluster = open_cluster_to_change(namespace, context)
    platform = platform_of(platform_file, platform_file is None, namespace, cluster)

    def job(word: str, epochs: int) -> DrillJob:
        own = [*(settings or ()), *SETTINGS, f"train.epochs={epochs}"]
        return job_of(run_file, own, gpus, workers, word, platform, namespace)

    def write(report: SoakReport) -> None:
        if report_file is not None:
            report_file.write_text(json.dumps(report.to_json(), indent=2) + "\n")

    options = SoakOptions(
        epochs=run.train.epochs,
        minutes=minutes,
        seed=secrets.randbelow(SEEDS) if seed is None else seed,
        is_beside=is_beside,
        keep=keep,
    )
    report = soak_run(cluster, platform, job, options, say=show.say, known=write)
    write(report)
    if as_json:
        print_json(report.to_json())
    else:
        show.soak_table(report)
    return 0 if report.is_passed else 1
