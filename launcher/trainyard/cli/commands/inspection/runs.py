"""Commands that show runs of a cluster: their list, their status, their logs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer

from trainyard.cli.options import (
    NAMESPACE,
    AllNamespaces,
    Context,
    Json,
    Namespace,
    RunName,
    check_namespace_option,
    local_storage_option,
    open_cluster,
    open_cluster_to_change,
    open_run_folder,
    print_json,
    run_name,
    yaml_text,
)
from trainyard.cli.record_lines import log_line, progress_text, summary_text
from trainyard.labels import RUN_LABEL
from trainyard.run import head_of, last_job, no_run, summary_of
from trainyard.submission.overview import (
    Table,
    columns_of,
    newest_of_each_run,
    row_of,
    run_statuses_of,
    wide_columns_text,
)
from trainyard.submission.queue_wait import with_queue_waits
from trainyard.submission.status import ENDED, RunStatus, run_status_of
from trainyard_trainer.run_files import names

if TYPE_CHECKING:
    from trainyard.cluster.cluster import Cluster
    from trainyard.submission.run_folder.kept_logs import WantedLog

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
    context: Context = None,
    output: Annotated[Output, _output_option("status")] = "table",
    as_json: Json = False,
) -> None:
    """Show all submissions of a namespace; of one run also its progress or its summary.

    `-o wide` also shows where and with what each attempt of one run ran (nodes, GPUs, hours, image, code),
    and where the time of its workers went.
    """
    from trainyard.cli import show
    from trainyard.cluster.kuberay import RayjobApi
    from trainyard.submission.current_status import current_status, with_places

    name = None if name is None else run_name(name)
    # Of one run, the summary is read from its folder.
    cluster = (open_cluster if name is None else open_cluster_to_change)(namespace, context)
    jobs = RayjobApi(cluster).list_jobs(name, cached=True)
    # The driver's log costs one request for each submission: it is read for one run only.
    statuses = (
        with_places(cluster, jobs, run_statuses_of(cluster, jobs))
        if name is None
        else [current_status(cluster, job) for job in jobs]
    )
    now = datetime.now(timezone.utc)
    rows = [row_of(job, run_status, now) for job, run_status in zip(jobs, statuses, strict=True)]
    summary = (
        None if name is None else summary_of(cluster, name, statuses[-1] if statuses else None)
    )
    if name is not None and not rows and summary is None:
        raise no_run(name, cluster)
    output = "json" if as_json else output
    if output in ("json", "yaml"):
        _print(output, {"submissions": rows, "summary": summary})
        return
    is_wide = output == "wide"
    show.submissions_table(rows, columns_of("status", is_wide=is_wide))
    if name is not None and is_wide and (record := _record(cluster, name, statuses, summary)):
        show.record_table(record)
    if is_wide and summary is not None and (goodput := summary.get("goodput")):
        show.goodput_table(goodput)
    if summary is not None:
        typer.echo(summary_text(summary))
    elif statuses and statuses[-1].progress is not None:
        typer.echo(progress_text(statuses[-1].progress))


def _record(
    cluster: Cluster, name: str, statuses: list[RunStatus], summary: Object | None
) -> list[Object]:
    """Return the record of a run's attempts from its folder; empty while its driver has not begun."""
    if summary is not None and names.RECORD in summary:
        return list(summary[names.RECORD])
    head = head_of(cluster, last_job(cluster, name))
    if head is None and not (statuses and statuses[-1].phase in ENDED):
        return []
    with open_run_folder(cluster, name, head) as folder:
        text = folder.read(names.RUN)
    return [] if text is None else list(json.loads(text).get(names.RECORD, []))


def list_runs(
    namespace: Namespace = NAMESPACE,
    context: Context = None,
    all_namespaces: AllNamespaces = False,
    output: Annotated[Output, _output_option("list")] = "table",
    as_json: Json = False,
) -> None:
    """List the runs of a namespace, or of all namespaces, each with its newest submission."""
    from trainyard.cli import show
    from trainyard.cluster.kuberay import RayjobApi
    from trainyard.submission.current_status import with_places

    cluster = open_cluster(namespace, context)
    jobs = newest_of_each_run(RayjobApi(cluster).list_jobs(everywhere=all_namespaces, cached=True))
    statuses = [run_status_of(job) for job in jobs]
    if not all_namespaces:
        statuses = with_places(cluster, jobs, with_queue_waits(cluster, jobs, statuses))
    now = datetime.now(timezone.utc)
    rows = [row_of(job, run_status, now) for job, run_status in zip(jobs, statuses, strict=True)]
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
    namespace: Annotated[
        Optional[str],
        typer.Option(
            "--namespace",
            "-n",
            metavar="NAMESPACE",
            help=f"The Kubernetes namespace.  [default: {NAMESPACE}]",
            callback=lambda given: given and check_namespace_option(given),
        ),
    ] = None,
    context: Context = None,
    worker: Annotated[
        Optional[int],
        typer.Option(
            metavar="RANK", min=0, help="Print the log of a worker instead of the driver's."
        ),
    ] = None,
    attempt: Annotated[
        Optional[int],
        typer.Option(metavar="N", min=1, help="Print the log of attempt N, from the run's folder."),
    ] = None,
    previous: Annotated[
        bool,
        typer.Option(
            "--previous",
            "-p",
            help="Print the log of the attempt, or of the worker's process, before the newest.",
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
    storage: Annotated[
        Optional[Path],
        typer.Option(
            metavar="DIR",
            parser=local_storage_option,
            help="Read the logs of a run of this machine, whose folder is in DIR.",
        ),
    ] = None,
) -> None:
    """Print the log of a run's driver or of a worker: of the pod or, if that is gone, of the run's folder."""
    name = run_name(name)
    wanted = _wanted_log(worker, attempt, previous)
    is_newest = attempt is None and not previous
    since_s = None if since is None else _seconds(since)
    _require_log_options_fit(wanted, is_newest, follow, since)
    if storage is not None:
        _require_no_cluster_options(namespace, context, follow, since)
        _print_log_of_this_machine(storage / name, wanted)
        return
    cluster = open_cluster_to_change(namespace or NAMESPACE, context)
    job = last_job(cluster, name)
    head = head_of(cluster, job)
    if head is None and follow and worker is None and job is not None:
        head = _await_head(cluster, name, job)
    if head is None or not is_newest:
        _print_kept_log(cluster, name, job, head, wanted)
    elif worker is not None:
        assert job is not None
        _print_worker_log(cluster, job, wanted, head, follow)
    else:
        assert job is not None
        _print_driver_log(cluster, job, head, follow, since_s)


def _wanted_log(worker: int | None, attempt: int | None, previous: bool) -> WantedLog:
    """Return which log is meant. Raises ConfigError for two options that exclude each other."""
    from trainyard.errors import ConfigError
    from trainyard.submission.run_folder.kept_logs import WantedLog

    if previous and attempt is not None:
        raise ConfigError("--attempt and --previous exclude each other")
    return WantedLog(worker=worker, attempt=attempt, is_previous=previous)


def _require_log_options_fit(
    wanted: WantedLog, is_newest: bool, follow: bool, since: str | None
) -> None:
    """Raise ConfigError for `--since` and `--follow` with a log that cannot have them."""
    from trainyard.errors import ConfigError

    if since is not None and (wanted.worker is not None or not is_newest):
        raise ConfigError(
            "--since is only for the log of a running driver: logs in a run's folder have no times"
        )
    if follow and not is_newest:
        raise ConfigError("--follow is only for the newest log")


def _require_no_cluster_options(
    namespace: str | None, context: str | None, follow: bool, since: str | None
) -> None:
    """Raise ConfigError for an option that `--storage` excludes."""
    from trainyard.errors import ConfigError

    options = {"--namespace": namespace, "--context": context, "--follow": follow, "--since": since}
    for option, is_given in options.items():
        if is_given:
            raise ConfigError(f"--storage and {option} exclude each other")


def _print_log_of_this_machine(folder: Path, wanted: WantedLog) -> None:
    """Print a log from the folder of a run of this machine."""
    from trainyard.local.results import LocalFiles

    files = LocalFiles(folder)
    _print_log((files.read(wanted.choose(folder.name, files.files())) or "").splitlines())


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


def _print_driver_log(
    cluster: Cluster, job: Object, head: str, follow: bool, since_s: int | None
) -> None:
    """Print the log of a running driver."""
    from trainyard.cluster.follow import follow_log
    from trainyard.submission.current_status import HEAD_CONTAINER
    from trainyard.submission.driver_log import lines_of_driver

    if follow:
        lines: Iterable[str] = follow_log(cluster, head, HEAD_CONTAINER, since_s=since_s)
    else:
        lines = cluster.log(head, HEAD_CONTAINER, since_s).splitlines()
    _print_log(lines_of_driver(job, lines))


def _print_kept_log(
    cluster: Cluster, name: str, job: Object | None, head: str | None, wanted: WantedLog
) -> None:
    """Print a log from the run's folder."""
    from trainyard.errors import ConfigError
    from trainyard.submission.run_folder.kept_logs import attempts_with_log
    from trainyard.submission.submit import is_live

    with open_run_folder(cluster, name, head) as folder:
        files = folder.files()
        has_log = bool(attempts_with_log(files))
        if not has_log and job is not None and is_live(job):
            raise ConfigError(
                f"run {name} has no log yet: its driver has not started",
                f"`trainyard logs {name} -f {cluster.options}` waits for it, and "
                f"`trainyard watch {name} {cluster.options}` shows what it waits for.",
            )
        if not has_log:
            raise no_run(name, cluster)
        text = folder.read(wanted.choose(name, files))
    _print_log((text or "").splitlines())


def _print_worker_log(
    cluster: Cluster, job: Object, wanted: WantedLog, head: str, follow: bool
) -> None:
    """Print the log of a worker: from Ray's files in its pod or, if that is gone, from the run's folder."""
    from trainyard.errors import ConfigError
    from trainyard.submission.workers import locate_worker

    assert wanted.worker is not None
    name = job["metadata"]["labels"][RUN_LABEL]
    with open_run_folder(cluster, name, head) as folder:
        try:
            place = locate_worker(cluster, name, folder.workers(), wanted.worker, job)
        except ConfigError:
            if follow:
                raise
            text = folder.read(wanted.choose(name, folder.files()))
            _print_log((text or "").splitlines())
            return
    files = f"/tmp/ray/session_latest/logs/worker-{place.ray_worker}-*"
    command = f"tail -n +1 -q {'-F ' if follow else ''}{files}"
    with cluster.execute(place.pod, place.container, ["sh", "-c", command]) as process:
        for _, data in process.output():
            typer.echo(data, nl=False)


def _print_log(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(log_line(line))


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
