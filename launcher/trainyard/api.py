"""The Python API: plan, render, submit, watch and train runs.

    from trainyard import load_run, submit_run
    run = submit_run(load_run("examples/digits.yaml", gpus=16))
    run.result().predict(["a.png"])

The commands call these functions, too. All errors are those of `trainyard.errors`.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainyard.planning import plan
from trainyard.planning.merge import with_source
from trainyard.planning.objects import pack_code, run_objects
from trainyard.planning.plan import Plan
from trainyard.platform import Platform, load_platform
from trainyard.run import NAMESPACE, Run, check_namespace, local_storage, published_platform
from trainyard.run_file.code.code_archive import Overlay, require_to_travel
from trainyard.run_file.code.source import source_of
from trainyard.run_file.models import RunConfig
from trainyard.submission.status import RunStatus
from trainyard_trainer.run_files import names, submission

if TYPE_CHECKING:
    from trainyard.cluster.cluster import Cluster

Object = dict[str, Any]

CLUSTER: Literal["cluster"] = "cluster"
"""The value of `platform` for the platform that the chart has published in the namespace."""


def plan_run(
    run: RunConfig,
    platform: Platform | Path | str | None = None,
    namespace: str = NAMESPACE,
    *,
    context: str | None = None,
) -> Plan:
    """Return the plan of a run: the numbers of its pods, workers and batches.

    `platform` is a platform, the path of a platform file, "cluster" for the namespace's ConfigMap, or None
    for the packaged platform. `context` is the kubeconfig context of that cluster, by default the current
    one. Raises ConfigError if the run cannot be planned exactly.
    """
    found = find_platform(platform, check_namespace(namespace), context=context)
    return plan.plan_run(run, found, namespace, pack_code(run))


def render_run(
    run: RunConfig,
    platform: Platform | Path | str | None = None,
    namespace: str = NAMESPACE,
    *,
    context: str | None = None,
) -> Object:
    """Return the RayJob of a run, the same that `submit_run` creates with the same platform.

    Raises ConfigError as `plan_run` does, and if the code is so large that only `submit_run` can upload it.
    Issues Python warnings for rules of KubeRay that the RayJob violates without being refused.
    """
    found = find_platform(platform, check_namespace(namespace), context=context)
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
    context: str | None = None,
) -> Run:
    """Create the RayJob of a run on the cluster; do nothing if it is running already.

    A run that has ended resumes from its last checkpoint. With `fresh` its folder is renamed first, and it
    starts from the beginning. `context` is the kubeconfig context of the cluster, by default the current one.
    Raises ConfigError if the name belongs to a run that trains another model, and
    ClusterError if another submission of the run is active or the cluster refuses.
    """
    from trainyard.cluster.cluster import Cluster
    from trainyard.cluster.kuberay import RayjobApi
    from trainyard.submission.submit import submit_rayjob

    cluster = Cluster(check_namespace(namespace), context=context)
    found = find_platform(platform, namespace, cluster)
    objects = run_objects(run, found, namespace)
    _warn(objects.warnings)

    def clear() -> None:
        set_run_aside(cluster, found, run.name)

    upload = upload_of(cluster, found, run.name, objects.plan.code)
    forget = partial(forget_failure, cluster, found, run.name)
    job = with_source(objects.job, source_of(run))
    submit_rayjob(RayjobApi(cluster), job, clear if fresh else None, upload, forget)
    return Run(run.name, namespace=namespace, context=context)


def watch_run(
    run: Run | str, namespace: str | None = None, *, context: str | None = None
) -> Iterator[RunStatus]:
    """Yield the status of a run on each change, until the run has succeeded, failed or stopped.

    Raises ConfigError if there is no such run, and RunFailed if its RayJob is deleted meanwhile.
    """
    if isinstance(run, str):
        run = Run(run, namespace=namespace, context=context)
    return run.watch()


def train_run(
    run: RunConfig,
    storage: str | Path = "runs",
    *,
    fresh: bool = False,
    on_status: Callable[[RunStatus | str], object] = lambda run_status: None,
) -> Run:
    """Train a run on this machine with a local Ray. A run that was interrupted resumes.

    `on_status` is called with each status, and with each other line that the trainer prints. Raises
    ConfigError if packages are missing or the trainer refuses the config, and RunFailed if the run fails.
    """
    from trainyard.local import training

    folder, code = local_storage(storage), pack_code(run, None)
    config = training.local_config(run, folder, os.cpu_count() or 1, code=code)
    if fresh:
        training.set_aside_locally(config, lambda line: None)
    with closing(training.train_locally(config, code=code, source=source_of(run))) as statuses:
        for run_status in statuses:
            on_status(run_status)
    return Run(run.name, storage=folder)


# Functions that the commands call too, and that are not part of the public API.


def find_platform(
    platform: Platform | Path | str | None,
    namespace: str,
    cluster: Cluster | None = None,
    context: str | None = None,
) -> Platform:
    """Return the platform that `platform` names; see `plan_run` for its values."""
    if isinstance(platform, Platform):
        return platform
    if platform != CLUSTER:
        return load_platform(None if platform is None else Path(platform))
    if cluster is None:
        from trainyard.cluster.cluster import Cluster

        cluster = Cluster(namespace, context=context)
    return published_platform(cluster)


def upload_of(
    cluster: Cluster,
    platform: Platform,
    run: str,
    code: Overlay | None,
    on_arrival: Callable[[int, int], object] = lambda arrived, length: None,
) -> Callable[[], None] | None:
    """Return a function that uploads the code to the run's folder; None if the RayJob holds the code."""
    if code is None or not code.is_uploaded:
        return None
    return partial(_upload, cluster, platform, run, code, on_arrival)


def _upload(
    cluster: Cluster,
    platform: Platform,
    run: str,
    code: Overlay,
    on_arrival: Callable[[int, int], object],
) -> None:
    """Upload code to the run's folder unless it is there already.

    `on_arrival` is called with the number of bytes that have arrived, and with the number of all bytes.
    """
    from trainyard.submission.run_folder.reader_pod import open_folder

    file, length = submission.code_file(code.sha256), len(code.archive)
    with open_folder(cluster, platform, run) as folder:
        if folder.sum(file) != code.sha256:
            folder.put(file, code.archive, code.sha256, lambda arrived: on_arrival(arrived, length))


def forget_failure(cluster: Cluster, platform: Platform, run: str) -> None:
    """Reset three records in the run's folder that apply to the retries of a RayJob that has ended.

    They are the final error that a retry repeats, the start of the time that `limits.max_run_s` counts, and
    the number of attempts that have failed. The next attempt then tries again, with all of its time.
    """
    from trainyard.submission.run_folder.reader_pod import open_folder

    nothing = b"{}"
    with open_folder(cluster, platform, run) as folder:
        for record in (names.FINAL_FAILURE, names.RUN_LIMIT, names.LAST_END):
            folder.put(record, nothing, hashlib.sha256(nothing).hexdigest())


def set_run_aside(cluster: Cluster, platform: Platform, run: str) -> str | None:
    """Rename the folder of a run on a cluster; return its new name, or None if there was no folder."""
    from trainyard.submission.run_folder.reader_pod import open_folder

    with open_folder(cluster, platform, run) as folder:
        return folder.set_aside()


def _warn(messages: tuple[str, ...]) -> None:
    """Issue Python warnings whose location is the caller of the API."""
    for message in messages:
        warnings.warn(message, stacklevel=3)
