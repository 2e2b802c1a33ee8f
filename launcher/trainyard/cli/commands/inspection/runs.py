"""Commands that show runs of a cluster: their list and their status."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer

from trainyard.cli.options import (
    NAMESPACE,
    AllNamespaces,
    Context,
    Json,
    Namespace,
    open_cluster,
    open_cluster_to_change,
    open_run_folder,
    print_json,
    run_name,
    yaml_text,
)
from trainyard.cli.record_lines import progress_text, summary_text
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


def _print(output: Output, document: Object) -> None:
    if output == "json":
        print_json(document)
    else:
        typer.echo(yaml_text(document), nl=False)
