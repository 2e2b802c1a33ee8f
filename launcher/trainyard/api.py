"""The same as on the command line, from Python: run file -> plan -> objects -> cluster -> a Run.

    from launcher import load_run, submit_run
    run = submit_run(load_run("examples/digits.yaml", gpus=16))
    run.result().predict(["a.png"])

The commands call what is here, and add words and tables. Errors are those of `trainyard.errors`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainyard.planning import plan
from trainyard.planning.objects import pack_code, run_objects
from trainyard.planning.plan import Plan
from trainyard.platform import Platform, load_platform
from trainyard.run import NAMESPACE, Run, check_namespace, local_storage, published_platform
from trainyard.run_file.code_archive import Overlay, require_to_travel
from trainyard.run_file.models import RunConfig
from trainyard.submission.status import RunStatus
from trainyard_trainer.run_files import submission

if TYPE_CHECKING:
    from trainyard.cluster.cluster import Cluster

Object = dict[str, Any]

CLUSTER: Literal["cluster"] = "cluster"
"""Stands for the platform that the chart has published in the namespace."""


def plan_run(
    run: RunConfig, platform: Platform | Path | str | None = None, namespace: str = NAMESPACE
) -> Plan:
    """The numbers of a run.

    The platform is a file's, by default the packaged one; "cluster" is that of the namespace's ConfigMap.
    Raises ConfigError for what cannot be planned exactly.
    """
    found = find_platform(platform, check_namespace(namespace))
    return plan.plan_run(run, found, namespace, pack_code(run))


def render_run(
    run: RunConfig, platform: Platform | Path | str | None = None, namespace: str = NAMESPACE
) -> Object:
    """The RayJob of a run: what `submit_run` sends with the same platform. It obeys all rules of KubeRay.

    Raises ConfigError as `plan_run` does, and for code that only `submit_run` can bring along; what may fail
    later is warned of.
    """
    found = find_platform(platform, check_namespace(namespace))
    objects = run_objects(run, found, namespace)
    require_to_travel(objects.plan.code)
    _warn(objects.warnings)
    return objects.job


def submit_run(
    run: RunConfig,
    namespace: str = NAMESPACE,
    platform: Platform | Path | str | None = CLUSTER,
    *,
    fresh: bool = False,
) -> Run:
    """Send a run to the cluster. Twice changes nothing; one that has ended goes on where it stopped.

    `fresh` begins anew, and sets the old folder aside. Raises ConfigError if the name has trained another
    model, ClusterError if the run is live as another submission, or the cluster refuses.
    """
    from trainyard.cluster.cluster import Cluster
    from trainyard.cluster.kuberay import RayjobApi
    from trainyard.submission.submit import submit_run

    cluster = Cluster(check_namespace(namespace))
    found = find_platform(platform, namespace, cluster)
    objects = run_objects(run, found, namespace)
    _warn(objects.warnings)

    def clear() -> None:
        set_aside(cluster, found, run.name)

    upload = upload_of(cluster, found, run.name, objects.plan.code)
    submit_run(RayjobApi(cluster), objects.job, clear if fresh else None, upload)
    return Run(run.name, namespace=namespace)


def watch_run(run: Run | str, namespace: str | None = None) -> Iterator[RunStatus]:
    """How a run stands, as often as that changes; the last run_status is its end, however it ended.

    Raises ConfigError if there is no such run, RunFailed if its RayJob is deleted meanwhile.
    """
    if isinstance(run, str):
        run = Run(run, namespace=namespace)
    return run.watch()


def train_run(
    run: RunConfig,
    storage: str | Path = "runs",
    *,
    fresh: bool = False,
    on_status: Callable[[RunStatus | str], object] = lambda run_status: None,
) -> Run:
    """Train on this machine, on a Ray of its own; a run that was there before goes on.

    `on_status` hears how it stands, and each line that the program says. Raises ConfigError if packages are
    missing or the program refuses the config, RunFailed if it fails.
    """
    from trainyard.local import training

    folder, code = local_storage(storage), pack_code(run, None)
    config = training.local_config(run, folder, os.cpu_count() or 1, code=code)
    if fresh:
        training.set_aside(config)
    with closing(training.train_locally(config, code=code)) as statuses:
        for run_status in statuses:
            on_status(run_status)
    return Run(run.name, storage=folder)


# What the commands call, too.


def find_platform(
    platform: Platform | Path | str | None, namespace: str, cluster: Cluster | None = None
) -> Platform:
    """The platform itself, that of a file, the packaged one for None, or the namespace's for "cluster"."""
    if isinstance(platform, Platform):
        return platform
    if platform != CLUSTER:
        return load_platform(None if platform is None else Path(platform))
    if cluster is None:
        from trainyard.cluster.cluster import Cluster

        cluster = Cluster(namespace)
    return published_platform(cluster)


def upload_of(
    cluster: Cluster,
    platform: Platform,
    run: str,
    code: Overlay | None,
    told: Callable[[int, int], object] = lambda arrived, length: None,
) -> Callable[[], None] | None:
    """What brings the run's code to its folder; None where it travels in the RayJob."""
    if code is None or not code.is_uploaded:
        return None
    return partial(_upload, cluster, platform, run, code, told)


def _upload(
    cluster: Cluster,
    platform: Platform,
    run: str,
    code: Overlay,
    told: Callable[[int, int], object],
) -> None:
    """Nothing is sent where it lies there already; `told` hears what has come, and of how much."""
    from trainyard.submission.reader_pod import open_folder

    file, length = submission.code_file(code.sha256), len(code.archive)
    with open_folder(cluster, platform, run) as folder:
        if folder.sum(file) != code.sha256:
            folder.put(file, code.archive, code.sha256, lambda arrived: told(arrived, length))


def set_aside(cluster: Cluster, platform: Platform, run: str) -> str | None:
    """Begin a run anew: the name under which all that it had lies now; None if it had nothing."""
    from trainyard.submission.reader_pod import open_folder

    with open_folder(cluster, platform, run) as folder:
        return folder.set_aside()


def _warn(messages: tuple[str, ...]) -> None:
    """Issue Python warnings that name the line that called this module."""
    for message in messages:
        warnings.warn(message, stacklevel=3)
