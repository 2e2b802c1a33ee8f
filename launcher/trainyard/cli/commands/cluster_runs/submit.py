"""The commands `submit` and `watch`."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from trainyard.cli.options import (
    NAMESPACE,
    Context,
    Fresh,
    Gpus,
    Name,
    Namespace,
    PlatformFile,
    RunFile,
    RunName,
    Settings,
    Warm,
    Workers,
    load_run_with_options,
    objects_with_warnings,
    open_cluster_to_change,
    platform_of,
    run_name,
    yaml_text,
)
from trainyard.cli.progress import show_progress
from trainyard.cli.record_lines import summary_text
from trainyard.run import last_job, no_run, require_success, running_folder, summary_of

if TYPE_CHECKING:
    from trainyard.cluster.cluster import Cluster
    from trainyard.platform import Platform


Timeout = Annotated[
    Optional[float],
    typer.Option(
        "--timeout",
        min=0,
        metavar="SECONDS",
        help="Stop watching after so many seconds with exit code 124. The run goes on.",
    ),
]


def submit(
    run_file: RunFile,
    settings: Settings = None,
    gpus: Gpus = None,
    workers: Workers = None,
    name: Name = None,
    warm: Warm = False,
    platform_file: PlatformFile = None,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
    fresh: Fresh = False,
    wait: Annotated[
        bool,
        typer.Option("--wait/--detach", help="Watch the run until it ends, or return at once."),
    ] = True,
    timeout_s: Timeout = None,
    dry_run: Annotated[
        Optional[str],
        typer.Option(
            "--dry-run",
            metavar="[=client|server]",
            help="Create nothing, and print the RayJob; with =server as the API server would store it.",
        ),
    ] = None,
) -> None:
    """Print the plan, create the RayJob on the cluster, and watch the run until it ends."""
    from trainyard.api import forget_failure, upload_of
    from trainyard.cli import show
    from trainyard.cluster.kuberay import RayjobApi
    from trainyard.errors import ConfigError
    from trainyard.planning.merge import with_source
    from trainyard.planning.reasons import explain_plan
    from trainyard.run_file.code.source import source_of
    from trainyard.submission.submit import submit_rayjob

    if dry_run not in (None, "client", "server"):
        raise ConfigError(f"--dry-run={dry_run}: must be client or server")
    if timeout_s is not None and not wait:
        raise ConfigError(
            "--timeout is how long the command watches the run, and --detach does not watch it",
            "Leave one of the two out. `limits.max_run_s` of the run file limits the run itself.",
        )
    run = load_run_with_options(run_file, settings, gpus, workers, name, warm)
    cluster = open_cluster_to_change(namespace, context)
    platform = platform_of(platform_file, platform_file is None, namespace, cluster)
    objects = objects_with_warnings(run, platform, namespace)
    planned, job = objects.plan, objects.job
    job_name = job["metadata"]["name"]
    if dry_run is not None:
        known = "" if dry_run == "client" else _known(cluster, job, fresh)
        if planned.code is not None and planned.code.is_uploaded:
            known += "; it cannot run before its code is uploaded"
        typer.echo(yaml_text(_dry(cluster, job) if dry_run == "server" else job), nl=False)
        show.say(f"RayJob {namespace}/{job_name} was not created (dry run: {dry_run}){known}")
        return
    show.plan_table(explain_plan(planned, run, platform))
    set_aside = partial(_set_aside, cluster, platform, run.name) if fresh else None
    upload = upload_of(cluster, platform, run.name, planned.code, show.UploadView(run.name))
    forget = partial(forget_failure, cluster, platform, run.name)
    sent = with_source(job, source_of(run, run_file))
    submitted = submit_rayjob(RayjobApi(cluster), sent, set_aside, upload, forget)
    show.say(
        {
            "created": f"RayJob {namespace}/{job_name} created",
            "live": f"RayJob {namespace}/{job_name} is running already",
            "resubmitted": f"RayJob {namespace}/{job_name} created again"
            + ("" if fresh else ": the run resumes"),
        }[submitted]
    )
    if wait:
        watch_to_end(cluster, run.name, job_name, timeout_s)
    else:
        show.say(f"detached: `trainyard watch {run.name} {cluster.options}` shows its progress")


def watch(
    name: RunName,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
    timeout_s: Timeout = None,
) -> None:
    """Show the progress of a run until it ends."""

    name = run_name(name)
    cluster = open_cluster_to_change(namespace, context)
    job = last_job(cluster, name)
    if job is None:
        raise no_run(name, cluster)
    watch_to_end(cluster, name, job["metadata"]["name"], timeout_s)


def _set_aside(cluster: Cluster, platform: Platform, run: str) -> None:
    from trainyard import api
    from trainyard.cli import show

    show.say_set_aside(run, api.set_run_aside(cluster, platform, run))


def _known(cluster: Cluster, job: dict[str, Any], fresh: bool) -> str:
    """Return which RayJob a submission would find, as words. Raises an error if it would be refused."""
    from trainyard.cluster.kuberay import RayjobApi
    from trainyard.submission.submit import find_same_submission, is_live

    existing = find_same_submission(RayjobApi(cluster), job, is_fresh=fresh)
    if existing is None:
        return ""
    return (
        ": it is running already"
        if is_live(existing)
        else ": it would replace the one that has ended"
    )


def _dry(cluster: Cluster, job: dict[str, Any]) -> dict[str, Any]:
    """Return the RayJob as the API server would store it, with defaults and without managedFields.

    The request uses an unused name of the same length, because the RayJob itself may exist already.
    """
    from trainyard.planning.merge import HASH_DIGITS

    name = job["metadata"]["name"]
    free = f"{name[:-HASH_DIGITS]}{secrets.token_hex(HASH_DIGITS)[:HASH_DIGITS]}"
    stored = cluster.create(job | {"metadata": job["metadata"] | {"name": free}}, dry_run=True)
    stored["metadata"].pop("managedFields", None)
    stored["metadata"]["name"] = name
    return stored


def watch_to_end(
    cluster: Cluster, run: str, submission: str, timeout_s: float | None = None
) -> None:
    """Show the progress of a submission until it ends; Ctrl-C and the end of the time leave it running."""
    from trainyard.cli import show
    from trainyard.submission.images import recording_images
    from trainyard.submission.watch import cancelling_retries, watch_submission

    try:
        statuses = watch_submission(cluster, submission, run, timeout_s=timeout_s)
        statuses = cancelling_retries(cluster, submission, statuses)
        head = partial(running_folder, cluster, run)
        last = show_progress(recording_images(cluster, run, statuses, head, show.say))
    except KeyboardInterrupt:
        show.say(f"detached: the run continues; `trainyard watch {run} {cluster.options}`")
        raise
    require_success(cluster, run, last)
    summary = summary_of(cluster, run, last) if last.ran else None
    if summary is not None:
        typer.echo(summary_text(summary))
