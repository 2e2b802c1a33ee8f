"""The commands `stop`, `suspend`, `resume` and `delete`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.options import (
    NAMESPACE,
    Context,
    Namespace,
    RunName,
    open_cluster_to_change,
    open_run_folder,
    run_name,
)
from trainyard.run import no_run

if TYPE_CHECKING:
    from trainyard.cluster.cluster import Cluster


def stop(
    name: RunName,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
    now: Annotated[
        bool,
        typer.Option("--now", help="Delete the RayJob at once, without saving a checkpoint first."),
    ] = False,
) -> None:
    """Save a checkpoint, stop a run and delete its RayJob. Its folder stays, and `submit` resumes it."""
    from trainyard.cli import show
    from trainyard.cluster.kuberay import RayjobApi
    from trainyard.planning.gitops import git_tool_of
    from trainyard.submission.control import live_jobs, stop_job
    from trainyard.submission.submit import delete_and_wait

    name = run_name(name)
    cluster = open_cluster_to_change(namespace, context)
    rayjobs = RayjobApi(cluster)
    live = live_jobs(rayjobs, name)
    for job in live:
        if tool := git_tool_of(job):
            show.say(
                f"warning: {tool} has made this RayJob from Git and creates it again: remove its file "
                "from Git first"
            )
        submission = job["metadata"]["name"]
        if now:
            delete_and_wait(rayjobs, submission)
            show.say(f"RayJob {namespace}/{submission} stopped without saving a checkpoint")
            continue
        show.say(f"stopping RayJob {namespace}/{submission}: its workers save a checkpoint ...")
        stopped = stop_job(cluster, rayjobs, job)
        how = {
            "in good order": "its driver ended by itself",
            "killed": "its driver did not end in time and was killed",
            "not running": "no driver was running",
        }[stopped.ended]
        saved = f", its checkpoint is of step {stopped.step}" if stopped.step is not None else ""
        show.say(f"RayJob {namespace}/{submission} stopped: {how}{saved}")
        if stopped.ended != "not running" and not saved:
            show.say("steps after the last checkpoint will be trained again")
    if not live:
        show.say(f"run {name} is not active in {namespace}: nothing to stop")


def suspend(name: RunName, namespace: Namespace = NAMESPACE, context: Context = None) -> None:
    """Delete the RayCluster of a run so that its nodes are free, until `resume`."""
    from trainyard.cli import show
    from trainyard.cluster.kuberay import RayjobApi
    from trainyard.planning.gitops import git_tool_of, is_created_once
    from trainyard.submission.control import is_suspended, live_jobs, suspend_job
    from trainyard.submission.queue_wait import is_held

    name = run_name(name)
    cluster = open_cluster_to_change(namespace, context)
    live = live_jobs(RayjobApi(cluster), name)
    if not live:
        raise no_live_run(name, cluster)
    for job in live:
        submission = job["metadata"]["name"]
        if is_suspended(cluster, job):
            show.say(f"RayJob {namespace}/{submission} is suspended already")
            continue
        if (tool := git_tool_of(job)) and not is_created_once(job):
            show.say(
                f"warning: {tool} has made this RayJob from Git and may set back fields that are "
                f"changed now: pause {tool} for it first"
            )
        suspend_job(cluster, job)
        if is_held(job):
            show.say(f"RayJob {namespace}/{submission} is suspended: its queue passes it over")
        else:
            show.say(f"RayJob {namespace}/{submission} is being suspended: its nodes become free")
    show.say(f"`trainyard resume {name} {cluster.options}` resumes it from its last checkpoint")


def resume(name: RunName, namespace: Namespace = NAMESPACE, context: Context = None) -> None:
    """Start a suspended run again, from its last checkpoint."""
    from trainyard.cli import show
    from trainyard.cluster.kuberay import RayjobApi
    from trainyard.submission.control import is_suspended, live_jobs, resume_job
    from trainyard.submission.queue_wait import queue_of

    name = run_name(name)
    cluster = open_cluster_to_change(namespace, context)
    live = live_jobs(RayjobApi(cluster), name)
    if not live:
        raise no_live_run(name, cluster)
    for job in live:
        submission = job["metadata"]["name"]
        if not is_suspended(cluster, job):
            show.say(f"RayJob {namespace}/{submission} is not suspended: nothing to resume")
            continue
        resume_job(cluster, job)
        queue = f": it waits in queue {queue_of(job)}" if queue_of(job) else ""
        show.say(f"RayJob {namespace}/{submission} is resumed{queue}")
        show.say(f"`trainyard watch {name} {cluster.options}` shows its progress")


def delete(
    name: RunName,
    namespace: Namespace = NAMESPACE,
    context: Context = None,
    folder: Annotated[
        bool, typer.Option("--folder", help="Delete its folder, too: checkpoints, model, report.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> int:
    """Delete the RayJobs of a run that has ended, and with --folder also its folder."""
    from trainyard.cli import show
    from trainyard.cluster.kuberay import RayjobApi
    from trainyard.errors import ClusterError
    from trainyard.submission.control import live_jobs
    from trainyard.submission.submit import delete_and_wait

    name = run_name(name)
    cluster = open_cluster_to_change(namespace, context)
    rayjobs = RayjobApi(cluster)
    if live := live_jobs(rayjobs, name):
        raise ClusterError(
            f"run {name} is still active as RayJob {live[0]['metadata']['name']}",
            f"Stop it first: `trainyard stop {name} {cluster.options}`.",
            reason="Conflict",
        )
    jobs = [job["metadata"]["name"] for job in rayjobs.list_jobs(name)]
    if not jobs and not folder:
        raise no_run(name, cluster)
    what = " and ".join(
        [
            *(f"RayJob {job}" for job in jobs),
            *(["its folder with all checkpoints"] if folder else []),
        ]
    )
    if not yes and not typer.confirm(f"Delete {what} of run {name} in {namespace}?", err=True):
        show.say("nothing was deleted")
        return 1
    for job in jobs:
        delete_and_wait(rayjobs, job)
        show.say(f"RayJob {namespace}/{job} deleted")
    if folder:
        with open_run_folder(cluster, name) as its:
            if not its.delete() and not jobs:
                raise no_run(name, cluster)
        show.say(f"the folder of run {name} was deleted")
    return 0


def no_live_run(name: str, cluster: Cluster) -> Exception:
    from trainyard.errors import ConfigError

    return ConfigError(
        f"run {name} is not active in namespace {cluster.namespace}",
        f"`trainyard status {name} {cluster.options}` shows how it ended; `submit` resumes it.",
    )
