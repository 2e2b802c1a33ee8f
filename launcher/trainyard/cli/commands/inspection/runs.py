"""Commands that show runs of a cluster: their list, their status, their logs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer

from trainyard.cli.options import (
    NAMESPACE,
    AllNamespaces,
    Json,
    Namespace,
    RunName,
    open_run_folder,
    print_json,
    run_name,
    yaml_text,
)
from trainyard.run import head_of, last_job, no_run, summary_of
from trainyard.submission.overview import (
    Table,
    columns_of,
    newest_of_each_run,
    row_of,
    run_statuses_of,
    wide_columns_text,
)
from trainyard.submission.status import run_status_of
from trainyard_trainer.run_files import names

if TYPE_CHECKING:
    from trainyard.cluster.cluster import Cluster

Object = dict[str, Any]
Output = Literal["table", "wide", "json", "yaml"]


def _output_option(table: Table) -> Any:
    """Return the option `--output`, whose help names the columns that the wide table adds."""
    return typer.Option(
        "--output",
        "-o",
        metavar="json|yaml|wide",
        help=f"Print JSON, YAML, or a wide table with: {wide_columns_text(table)}.",
    )


def status(
    name: Annotated[
        Optional[str],
        typer.Argument(metavar="[NAME]", help="The name of a run, or its run file."),
    ] = None,
    namespace: Namespace = NAMESPACE,
    output: Annotated[Output, _output_option("status")] = "table",
    as_json: Json = False,
) -> None:
    """Show all submissions of a namespace; of one run also its progress or its summary."""
    from trainyard.cli import show
    from trainyard.cluster.cluster import Cluster
    from trainyard.cluster.kuberay import RayjobApi
    from trainyard.submission.current_status import current_status

    name = None if name is None else run_name(name)
    cluster = Cluster(namespace)
    jobs = RayjobApi(cluster).list_jobs(name, cached=True)
    # The driver's log costs one request for each submission: it is read for one run only.
    statuses = (
        run_statuses_of(cluster, jobs)
        if name is None
        else [current_status(cluster, job) for job in jobs]
    )
    now = datetime.now(timezone.utc)
    rows = [row_of(job, run_status, now) for job, run_status in zip(jobs, statuses, strict=True)]
    summary = (
        None if name is None else summary_of(cluster, name, statuses[-1] if statuses else None)
    )
    if name is not None and not rows and summary is None:
        raise no_run(name, namespace)
    output = "json" if as_json else output
    if output in ("json", "yaml"):
        _print(output, {"submissions": rows, "summary": summary})
        return
    show.submissions_table(rows, columns_of("status", is_wide=output == "wide"))
    if summary is not None:
        typer.echo(show.summary_text(summary))
    elif statuses and statuses[-1].progress is not None:
        typer.echo(show.progress_text(statuses[-1].progress))


def list_runs(
    namespace: Namespace = NAMESPACE,
    all_namespaces: AllNamespaces = False,
    output: Annotated[Output, _output_option("list")] = "table",
    as_json: Json = False,
) -> None:
    """List the runs of a namespace, or of all namespaces, each with its newest submission."""
    from trainyard.cli import show
    from trainyard.cluster.cluster import Cluster
    from trainyard.cluster.kuberay import RayjobApi

    jobs = newest_of_each_run(
        RayjobApi(Cluster(namespace)).list_jobs(everywhere=all_namespaces, cached=True)
    )
    now = datetime.now(timezone.utc)
    rows = [row_of(job, run_status_of(job), now) for job in jobs]
    output = "json" if as_json else output
    if output in ("json", "yaml"):
        _print(output, {"runs": rows})
        return
    columns = columns_of("list", is_wide=output == "wide", with_namespace=all_namespaces)
    show.submissions_table(rows, columns)
    if not rows:
        show.say("no runs" if all_namespaces else f"no runs in namespace {namespace}")


def logs(
    name: RunName,
    namespace: Namespace = NAMESPACE,
    worker: Annotated[
        Optional[int],
        typer.Option(
            metavar="RANK", min=0, help="Print the log of a worker instead of the driver's."
        ),
    ] = None,
    attempt: Annotated[
        Optional[int],
        typer.Option(
            metavar="N", min=1, help="Print the driver's log of attempt N, from the run's folder."
        ),
    ] = None,
    previous: Annotated[
        bool,
        typer.Option(
            "--previous", "-p", help="Print the driver's log of the attempt before the newest."
        ),
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")
    ] = False,
    since: Annotated[
        Optional[str],
        typer.Option(
            metavar="5m",
            help="Print only the last seconds, minutes or hours, such as 90s, 5m or 2h.",
        ),
    ] = None,
) -> None:
    """Print the driver's log, from the head pod or, if that is gone, from the run's folder."""
    from trainyard.cluster.cluster import Cluster
    from trainyard.cluster.follow import follow_log
    from trainyard.errors import ConfigError
    from trainyard.submission.current_status import HEAD_CONTAINER

    name = run_name(name)
    since_s = None if since is None else _seconds(since)
    wanted = {"--worker": worker is not None, "--attempt": attempt is not None}
    wanted["--previous"] = previous
    if sum(wanted.values()) > 1:
        raise ConfigError(
            f"{' and '.join(key for key in wanted if wanted[key])} exclude each other"
        )
    if since_s is not None and any(wanted.values()):
        raise ConfigError(
            "--since is only for the log of a running driver: logs in a run's folder have no times"
        )
    cluster = Cluster(namespace)
    job = last_job(cluster, name)
    head = head_of(cluster, job)
    if head is None and follow and job is not None and not any(wanted.values()):
        head = _await_head(cluster, name, job)
    if worker is not None:
        _print_worker_log(cluster, name, worker, head, follow)
    elif head is None or attempt is not None or previous:
        _print_kept_log(cluster, name, job, head, attempt, previous)
    elif follow:
        _print_log(follow_log(cluster, head, HEAD_CONTAINER, since_s=since_s))
    else:
        _print_log(cluster.log(head, HEAD_CONTAINER, since_s).splitlines())


def _await_head(cluster: Cluster, name: str, job: Object) -> str | None:
    """Wait for the run's head pod and return its name; None if the run ends before."""
    from trainyard.cli import show
    from trainyard.submission.submit import is_live
    from trainyard.submission.watch import watch_submission

    if not is_live(job):
        return None
    show.say(f"run {name} has no log yet: waiting for its head pod")
    for _ in watch_submission(cluster, job["metadata"]["name"], name):
        if (head := head_of(cluster, last_job(cluster, name))) is not None:
            return head
    return None


def _print_kept_log(
    cluster: Cluster,
    name: str,
    job: Object | None,
    head: str | None,
    attempt: int | None,
    previous: bool,
) -> None:
    """Print the log of an attempt from the run's folder, by default of the newest one."""
    from trainyard.errors import ConfigError
    from trainyard.submission.submit import is_live

    with open_run_folder(cluster, name, head) as folder:
        kept = folder.logs()
        if not kept and job is not None and is_live(job):
            raise ConfigError(
                f"run {name} has no log yet: its driver has not started",
                f"`trainyard logs {name} -f -n {cluster.namespace}` waits for it, and "
                f"`trainyard watch {name} -n {cluster.namespace}` shows what it waits for.",
            )
        if not kept:
            raise no_run(name, cluster.namespace)
        if attempt is None:
            attempt = kept[-2] if previous and len(kept) > 1 else kept[-1]
        if attempt not in kept or (previous and len(kept) == 1):
            raise ConfigError(
                f"run {name} has no log of attempt {attempt if not previous else 'before the last'}",
                f"It has those of: {', '.join(map(str, kept))}.",
            )
        text = folder.read(names.log_of(attempt))
    _print_log((text or "").splitlines())


def _print_worker_log(
    cluster: Cluster, name: str, rank: int, head: str | None, follow: bool
) -> None:
    """Print the output of one worker from Ray's log files, which exist only in the worker's pod."""
    from trainyard.submission.workers import locate_worker

    with open_run_folder(cluster, name, head) as folder:
        place = locate_worker(cluster, name, folder.workers(), rank)
    files = f"/tmp/ray/session_latest/logs/worker-{place.ray_worker}-*"
    command = f"tail -n +1 -q {'-F ' if follow else ''}{files}"
    with cluster.execute(place.pod, place.container, ["sh", "-c", command]) as process:
        for _, data in process.output():
            typer.echo(data, nl=False)


def _print_log(lines: Iterable[str]) -> None:
    from trainyard.cli import show

    for line in lines:
        typer.echo(show.log_line(line))


def _seconds(text: str) -> int:
    """Return the seconds of a duration such as `90s`, `5m`, `2h` or `1d`. Raises ConfigError."""
    from trainyard.errors import ConfigError

    found = re.fullmatch(r"(\d+)([smhd])", text)
    if found is None:
        raise ConfigError(f"--since = {text!r}: must be a number and s, m, h or d, such as 5m")
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def _print(output: Output, document: Object) -> None:
    if output == "json":
        print_json(document)
    else:
        typer.echo(yaml_text(document), nl=False)
