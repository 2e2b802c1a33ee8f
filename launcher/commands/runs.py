"""Commands that send a run to a cluster, and see to it there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from launcher.commands.options import (
    NAMESPACE,
    Gpus,
    Json,
    Name,
    Namespace,
    PlatformFile,
    RunFile,
    RunName,
    Settings,
    Workers,
    load_run,
    objects_of,
    platform_of,
    print_json,
    run_name,
)
from launcher.commands.progress import show_progress

if TYPE_CHECKING:
    from launcher.errors import LauncherError
    from launcher.watch import Sight


def submit(
    run_file: RunFile,
    settings: Settings = None,
    gpus: Gpus = None,
    workers: Workers = None,
    name: Name = None,
    platform_file: PlatformFile = None,
    namespace: Namespace = NAMESPACE,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
) -> None:
    """Show the plan, send the run to the cluster, and watch it to its end."""
    from launcher import show
    from launcher.cluster import Cluster
    from launcher.kuberay import RayjobApi
    from launcher.plan import explain_plan
    from launcher.submit import submit_run

    run = load_run(run_file, settings, gpus, workers, name)
    cluster = Cluster(namespace)
    platform = platform_of(platform_file, platform_file is None, namespace, cluster)
    planned, job = objects_of(run, platform, namespace)
    show.plan_table(explain_plan(planned, run, platform))
    submitted = submit_run(RayjobApi(cluster), job)
    job_name = job["metadata"]["name"]
    show.say(
        {
            "created": f"RayJob {namespace}/{job_name} created",
            "live": f"RayJob {namespace}/{job_name} is live already",
            "resubmitted": f"RayJob {namespace}/{job_name} created again: the run goes on",
        }[submitted]
    )
    if not detach:
        _watch(cluster, run.name, job_name)


def watch(name: RunName, namespace: Namespace = NAMESPACE) -> None:
    """Show the progress of a run until it ends."""
    from launcher.cluster import Cluster
    from launcher.kuberay import RayjobApi

    name = run_name(name)
    cluster = Cluster(namespace)
    _watch(cluster, name, _last_job(RayjobApi(cluster), name, namespace)["metadata"]["name"])


def status(
    name: Annotated[
        Optional[str], typer.Argument(metavar="[NAME]", help="A run's name, or its run file.")
    ] = None,
    namespace: Namespace = NAMESPACE,
    as_json: Json = False,
) -> None:
    """Show the submissions of a namespace, or one run with what its folder says."""
    from launcher import show
    from launcher.cluster import Cluster
    from launcher.kuberay import RUN_LABEL, RayjobApi
    from launcher.watch import attempts_of, look

    name = None if name is None else run_name(name)
    cluster = Cluster(namespace)
    jobs = RayjobApi(cluster).list_jobs(name)
    sights = [(job, look(cluster, job)) for job in jobs]
    rows = [
        {
            "run": job["metadata"]["labels"][RUN_LABEL],
            "submission": sight.submission,
            "phase": sight.phase,
            "attempts": attempts_of(job.get("status", {})),
            "created": job["metadata"]["creationTimestamp"],
            "message": sight.message,
            "progress": sight.progress,
        }
        for job, sight in sights
    ]
    summary = None if name is None else _summary(cluster, name, sights[-1][1] if sights else None)
    if name is not None and not rows and summary is None:
        raise _no_run(name, namespace)
    if as_json:
        print_json({"submissions": rows, "summary": summary})
        return
    headings = ("run", "submission", "phase", "attempts", "created", "message")
    show.table(headings, [[str(row[key]) for key in headings] for row in rows])
    if summary is not None:
        typer.echo(show.summary_text(summary))
    elif name is not None and sights and sights[-1][1].progress is not None:
        typer.echo(show.progress_text(sights[-1][1].progress))


def logs(
    name: RunName,
    namespace: Namespace = NAMESPACE,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on to the end.")] = False,
) -> None:
    """Print the driver's log: from the head, or from the run's folder when the cluster is gone."""
    from launcher.cluster import Cluster
    from launcher.kuberay import RayjobApi
    from launcher.reader import read_folder
    from launcher.watch import HEAD_CONTAINER, head_pod

    name = run_name(name)
    cluster = Cluster(namespace)
    jobs = RayjobApi(cluster).list_jobs(name)
    ray_cluster = jobs[-1].get("status", {}).get("rayClusterName") if jobs else None
    pod = head_pod(cluster, ray_cluster) if ray_cluster else None
    if pod is not None and follow:
        _print_log(line.partition(" ")[2] for line in cluster.follow_log(pod, HEAD_CONTAINER))
        return
    if pod is not None:
        _print_log(cluster.log(pod, HEAD_CONTAINER).splitlines())
        return
    platform = platform_of(None, True, namespace, cluster)
    kept = sorted(
        (
            file
            for file in (read_folder(cluster, platform, name) or "").splitlines()
            if file.startswith("logs/attempt-")
        ),
        key=lambda file: int(file.removeprefix("logs/attempt-").removesuffix(".log")),
    )
    if not kept:
        raise _no_run(name, namespace)
    _print_log((read_folder(cluster, platform, name, kept[-1]) or "").splitlines())


def stop(name: RunName, namespace: Namespace = NAMESPACE) -> None:
    """Stop a run: its RayJob and cluster go, its folder stays, and `submit` resumes it."""
    from launcher import show
    from launcher.cluster import Cluster
    from launcher.kuberay import RayjobApi
    from launcher.submit import stop_run

    name = run_name(name)
    stopped = stop_run(RayjobApi(Cluster(namespace)), name)
    for submission in stopped:
        show.say(f"RayJob {namespace}/{submission} stopped")
    if not stopped:
        show.say(f"run {name} is not live in {namespace}: nothing to stop")


def _print_log(lines: Iterable[str]) -> None:
    from launcher import show

    for line in lines:
        typer.echo(show.log_line(line))


def _last_job(rayjobs: Any, name: str, namespace: str) -> dict[str, Any]:
    jobs = rayjobs.list_jobs(name)
    if not jobs:
        raise _no_run(name, namespace)
    last: dict[str, Any] = jobs[-1]
    return last


def _no_run(name: str, namespace: str) -> LauncherError:
    from launcher.errors import ConfigError

    return ConfigError(
        f"there is no run {name} in namespace {namespace}",
        f"`trainyard status -n {namespace}` lists the runs there.",
    )


def _watch(cluster: Any, run: str, submission: str) -> None:
    """Show a submission to its end; Ctrl-C leaves it running."""
    from launcher import show
    from launcher.errors import RunFailed
    from launcher.watch import watch_run

    try:
        last = show_progress(watch_run(cluster, submission, run))
    except KeyboardInterrupt:
        show.say(f"detached: the run goes on; `trainyard watch {run} -n {cluster.namespace}`")
        raise
    logs = f"Logs: `trainyard logs {run} -n {cluster.namespace}`."
    if last.phase == "stopped":
        raise RunFailed(f"run {run} was stopped", logs)
    summary = _summary(cluster, run, last) if last.ran else None
    if last.phase == "failed":
        details = [summary["error"] if summary else None, last.message, logs]
        raise RunFailed(f"run {run} failed", *(text for text in details if text))
    if summary is not None:
        typer.echo(show.summary_text(summary))


def _summary(cluster: Any, name: str, last: Sight | None) -> dict[str, Any] | None:
    """What the run left in its folder: from the driver's last words, else through the reader pod."""
    from launcher.reader import read_folder
    from launcher.watch import ENDED

    if last is not None and (last.summary is not None or last.phase not in ENDED):
        return last.summary
    text = read_folder(
        cluster, platform_of(None, True, cluster.namespace, cluster), name, "summary.json"
    )
    return None if text is None else json.loads(text)
