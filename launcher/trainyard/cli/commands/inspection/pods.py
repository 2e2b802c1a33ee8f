"""The commands `dashboard`, `shell`, `debug` and `cp`, which connect to the pods of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from trainyard.cli.options import (
    NAMESPACE,
    Context,
    Namespace,
    RunName,
    local_path,
    open_cluster,
    open_cluster_to_change,
    open_run_folder,
    run_name,
)
from trainyard.run import head_of, last_job, no_run
from trainyard_trainer.run_files.programs.isolation import IN_PODS

if TYPE_CHECKING:
    from trainyard.cluster.cluster import Cluster
    from trainyard.submission.workers import WorkerLocation


def dashboard(
    name: RunName,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
    port: Annotated[
        int,
        typer.Option(
            metavar="PORT", min=0, max=65535, help="The port on this machine; 0 takes a free one."
        ),
    ] = 8265,
) -> None:
    """Forward a local port to the Ray dashboard of a run until Ctrl-C."""
    from trainyard.cli import show
    from trainyard.cluster.port_forward import DASHBOARD_PORT, PortForward, dashboard_token

    name = run_name(name)
    cluster = open_cluster(namespace, context)
    job = last_job(cluster, name)
    head = head_of(cluster, job)
    if job is None or head is None:
        raise _no_head(name, cluster)
    with PortForward(lambda: cluster.port_forward(head, DASHBOARD_PORT), port) as forward:
        typer.echo(f"http://127.0.0.1:{forward.port}")
        if token := dashboard_token(cluster, job["status"]["rayClusterName"]):
            typer.echo(f"token: {token}")
        show.say("Ctrl-C closes the port; the run continues")
        forward.serve()


Rank = Annotated[int, typer.Argument(metavar="RANK", min=0, help="The rank of the worker.")]


def shell(
    name: RunName,
    rank: Rank,
    command: Annotated[
        Optional[list[str]],
        typer.Argument(metavar="[-- COMMAND...]", help="A command to run instead of a shell."),
    ] = None,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
) -> int:
    """Open a shell in the pod of a worker, or run a command there and exit with its exit code."""
    name = run_name(name)
    cluster = open_cluster_to_change(namespace, context)
    location = _worker(cluster, name, rank)
    return _connect(cluster, location, command or ["bash"], is_for_terminal=not command)


def debug(
    name: RunName, rank: Rank, namespace: Namespace = NAMESPACE, context: Context = None
) -> int:
    """Debug a worker with pdb, from its next step on. It trains on when you leave."""
    name = run_name(name)
    cluster = open_cluster_to_change(namespace, context)
    location = _worker(cluster, name, rank)
    program = [*IN_PODS, "trainyard_trainer.tools.attach", str(location.process)]
    return _connect(cluster, location, program, is_for_terminal=True)


def _worker(cluster: Cluster, name: str, rank: int) -> WorkerLocation:
    """Return where a worker of a run is running. Raises ConfigError."""
    from trainyard.submission.workers import locate_worker

    job = last_job(cluster, name)
    head = head_of(cluster, job)
    if job is None or head is None:
        raise _no_head(name, cluster)
    with open_run_folder(cluster, name, head) as folder:
        return locate_worker(cluster, name, folder.workers(), rank, job)


def _connect(
    cluster: Cluster, location: WorkerLocation, command: list[str], *, is_for_terminal: bool
) -> int:
    """Run a command in a worker's container, connected to this terminal, and return its exit code.

    A command that is for a terminal gets one there, if this process has one.
    """
    from trainyard.cluster import terminal

    is_terminal = is_for_terminal and terminal.is_one()
    with cluster.execute(
        location.pod, location.container, command, stdin=True, terminal=is_terminal
    ) as process:
        return terminal.connect(process, is_raw=is_terminal)


def cp(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN:[PATH]",
            help="The run, and a file or folder in its folder; without PATH everything.",
        ),
    ],
    target: Annotated[
        Optional[Path],
        typer.Argument(
            metavar="[LOCAL]",
            parser=local_path,
            help="The target on this machine; without it the files are listed.",
        ),
    ] = None,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
) -> None:
    """Copy files from a run's folder to this machine, even if its RayCluster is gone."""
    from trainyard.cli import show
    from trainyard.errors import ConfigError

    name, colon, path = source.partition(":")
    if not colon:
        raise ConfigError(
            f"{source!r} is not RUN:PATH", f"`trainyard cp {source}:` lists its files."
        )
    name, path = run_name(name), path.strip("/")
    cluster = open_cluster_to_change(namespace, context)
    with open_run_folder(cluster, name, head_of(cluster, last_job(cluster, name))) as folder:
        if target is None:
            found = [file for file in folder.files() if file == path or _is_below(file, path)]
            if not found:
                raise no_run(name, cluster)
            typer.echo("\n".join(found))
            return
        written = folder.copy(path, target)
    size = sum(file.stat().st_size for file in written)
    show.say(f"{len(written)} file{'s' if len(written) > 1 else ''}, {size:,} bytes in {target}")


def _is_below(file: str, path: str) -> bool:
    return not path or file.startswith(f"{path}/")


def _no_head(name: str, cluster: Cluster) -> Exception:
    from trainyard.errors import ConfigError

    return ConfigError(
        f"run {name} has no running head in namespace {cluster.namespace}",
        f"`trainyard status {name} {cluster.options}` shows its phase.",
    )
