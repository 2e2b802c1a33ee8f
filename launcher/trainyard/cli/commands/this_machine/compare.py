"""The command `compare`: run the trainer's tool that compares two runs, on their folders."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from trainyard.cli.options import (
    RUNS,
    Context,
    Json,
    check_namespace_option,
    open_cluster_to_change,
    open_run_folder,
    run_name,
)
from trainyard.cli.tools import AnyRun, Endpoint, Plot, Storage, any_run
from trainyard.run import head_of, last_job, no_run
from trainyard_trainer.run_files import names

if TYPE_CHECKING:
    from trainyard.cluster.cluster import Cluster

COMPARED = (
    *(names.RUN, names.SUMMARY, names.PROGRESS, names.SUBMISSION),
    *(names.METRICS, names.ATTEMPTS, names.STARTS, names.FAILURES),
)
"""What `trainyard_trainer.tools.compare` reads of a run's folder."""


def compare(
    a: AnyRun,
    b: AnyRun,
    storage: Storage = None,
    endpoint: Endpoint = None,
    namespace: Annotated[
        Optional[str],
        typer.Option(
            "--namespace",
            "-n",
            metavar="NAMESPACE",
            help="Compare two runs of a cluster, whose folders are read there.",
            callback=lambda given: given and check_namespace_option(given),
        ),
    ] = None,
    context: Context = None,
    plot: Plot = None,
    as_json: Json = False,
) -> int:
    """Compare two runs: config, results, speed, failures, versions, memory."""
    from trainyard.errors import ConfigError
    from trainyard.local.tools import run_tool

    options = [] if plot is None else [f"--plot={plot}"]
    options += ["--json"] if as_json else []
    if namespace is None and context is not None:
        raise ConfigError(
            "--context needs --namespace: without it, runs on this machine are compared"
        )
    if namespace is None:
        options += [f"--storage={storage or RUNS}"]
        options += [] if endpoint is None else [f"--endpoint={endpoint}"]
        return run_tool("compare", [*options, "--", any_run(a), any_run(b)])
    if storage is not None or endpoint is not None:
        raise ConfigError("--namespace excludes --storage and --endpoint: the cluster knows them")
    with tempfile.TemporaryDirectory() as place:
        names = (run_name(a), run_name(b))
        _copy(names, open_cluster_to_change(namespace, context), Path(place))
        return run_tool("compare", [*options, f"--storage={place}", "--", *names])


def _copy(names: tuple[str, str], cluster: Cluster, place: Path) -> None:
    """Copy the files that are compared to this machine. Raises ConfigError if a run does not exist."""
    head = head_of(cluster, last_job(cluster, names[0]))
    with open_run_folder(cluster, names[0], head) as first:
        for name in names:
            folder = first.sibling(name)
            files = folder.files()
            if not files:
                raise no_run(name, cluster)
            for file in sorted({*COMPARED} & {*files}):
                folder.copy(file, place / name / file)
