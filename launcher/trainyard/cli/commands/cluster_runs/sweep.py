"""The command `sweep`: train one run for each combination of values, and compare them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from trainyard.cli.options import (
    NAMESPACE,
    RUNS,
    Context,
    Gpus,
    Json,
    Name,
    Namespace,
    PlatformFile,
    RunFile,
    Settings,
    Workers,
    local_storage_option,
    open_cluster_to_change,
    platform_of,
    print_json,
)

if TYPE_CHECKING:
    from trainyard.quantities import Object
    from trainyard.sweeps.outcomes import Goal

AT_ONCE = 4


def sweep(
    run_file: RunFile,
    swept: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=V1,V2...",
            help="A key of the run file with its values. Repeat it for more keys.",
        ),
    ],
    settings: Settings = None,
    gpus: Gpus = None,
    workers: Workers = None,
    name: Name = None,
    max_parallel: Annotated[
        Optional[int],
        typer.Option(
            metavar="N",
            min=1,
            help=f"How many runs are on the cluster at the same time.  [default: {AT_ONCE}]",
        ),
    ] = None,
    metric: Annotated[
        Optional[str],
        typer.Option(
            metavar="NAME",
            help="The metric that decides which run is best. A metric of a recipe has its own direction; of "
            "others the highest value is best, or the lowest if NAME ends in `loss`. --metric=-NAME takes "
            "the lowest value of any metric.  [default: the first metric of a built-in recipe, else "
            "val_loss]",
        ),
    ] = None,
    platform_file: PlatformFile = None,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
    here: Annotated[
        bool, typer.Option("--here", help="Train on this machine, one run after the other.")
    ] = False,
    storage: Annotated[
        Optional[Path],
        typer.Option(
            metavar="DIR",
            parser=local_storage_option,
            help=f"With --here, the folder for the folders of runs.  [default: {RUNS}]",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Train one run for each combination of values, and compare them. The same command resumes a sweep."""
    from trainyard.cli import show
    from trainyard.run_file.code.source import source_of
    from trainyard.sweeps.combinations import load_sweep
    from trainyard.sweeps.outcomes import goal_of, rows_of

    _require_options_fit(here, max_parallel, platform_file, storage)
    combinations = load_sweep(
        run_file, swept, settings or (), gpus=gpus, workers=workers, name=name
    )
    source = source_of(combinations[0].run, run_file)
    goal = goal_of(metric, [combination.run for combination in combinations])
    if here:
        from trainyard.sweeps.on_this_machine import train_here

        outcomes = train_here(combinations, goal, storage or RUNS, show.say, source)
    else:
        from trainyard.sweeps.on_cluster import train_on_cluster

        cluster = open_cluster_to_change(namespace, context)
        platform = platform_of(platform_file, platform_file is None, namespace, cluster)
        at_once = max_parallel or AT_ONCE
        outcomes = train_on_cluster(
            cluster, platform, combinations, goal, at_once, show.say, show.UploadView, source
        )
    rows = rows_of(combinations, outcomes, goal)
    failed = [row["run"] for row in rows if row["phase"] != "succeeded"]
    if as_json:
        print_json({"runs": rows})
    _say_results(rows, goal, len(failed), with_table=not as_json)
    if failed and not here:
        show.say(f"`trainyard explain {failed[0]} {cluster.options}` finds the cause")
    return 1 if failed else 0


def _require_options_fit(
    here: bool, max_parallel: int | None, platform_file: Path | None, storage: Path | None
) -> None:
    """Raise ConfigError for options of a cluster with `--here`, and for one of `--here` without it."""
    from trainyard.errors import ConfigError

    if here and max_parallel not in (None, 1):
        raise ConfigError(
            f"--max-parallel {max_parallel} is for a cluster: --here trains one run after the other",
            "Leave it out.",
        )
    if here and platform_file is not None:
        raise ConfigError("--platform is for a cluster, and --here needs none: leave one out")
    if storage is not None and not here:
        raise ConfigError("--storage is for --here: on a cluster the platform says where runs lie")


def _say_results(rows: list[Object], goal: Goal, failed: int, *, with_table: bool) -> None:
    """Print the table of a sweep's runs, how many succeeded, and why none is the best."""
    from trainyard.cli import show
    from trainyard.sweeps.outcomes import table_of_rows

    if with_table:
        show.table(*table_of_rows(rows, goal))
    show.say(f"{len(rows)} runs: {len(rows) - failed} succeeded, {failed} did not")
    if failed < len(rows) and not any(row["best"] for row in rows):
        reported = sorted({name for row in rows for name in row["metrics"]})
        show.say(
            f"no run has reported {goal.metric}; reported were: {', '.join(reported) or 'no metrics'}"
        )
