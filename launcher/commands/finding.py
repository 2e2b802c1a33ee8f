"""What the commands about submitted runs look up: a run's RayJobs, its head, its folder, its summary."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from launcher.commands.options import platform_of

if TYPE_CHECKING:
    from launcher.cluster import Cluster
    from launcher.errors import LauncherError
    from launcher.reader import Folder
    from launcher.watch import Sight

Object = dict[str, Any]


def no_run(name: str, namespace: str) -> LauncherError:
    from launcher.errors import ConfigError

    return ConfigError(
        f"there is no run {name} in namespace {namespace}",
        f"`trainyard list -n {namespace}` lists the runs there.",
    )


def last_job(cluster: Cluster, name: str) -> Object | None:
    """The newest RayJob of a run, or None."""
    from launcher.kuberay import RayjobApi

    jobs = RayjobApi(cluster).list_jobs(name, cached=True)
    return jobs[-1] if jobs else None


def head_of(cluster: Cluster, job: Object | None) -> str | None:
    """Name of the running head pod of a submission, or None."""
    from launcher.watch import head_pod

    ray_cluster = "" if job is None else job.get("status", {}).get("rayClusterName", "")
    return head_pod(cluster, ray_cluster) if ray_cluster else None


def folder_of(
    cluster: Cluster, name: str, head: str | None = None
) -> AbstractContextManager[Folder]:
    """The run's folder, through its head where there is one."""
    from launcher.reader import open_folder

    platform = platform_of(None, True, cluster.namespace, cluster)
    return open_folder(cluster, platform, name, head)


def summary_of(cluster: Cluster, name: str, last: Sight | None) -> Object | None:
    """What the run left in its folder: from the driver's last words, else from the folder itself."""
    from launcher.watch import ENDED

    if last is not None and (last.summary is not None or last.phase not in ENDED):
        return last.summary
    with folder_of(cluster, name) as folder:
        text = folder.read("summary.json")
    return None if text is None else json.loads(text)
