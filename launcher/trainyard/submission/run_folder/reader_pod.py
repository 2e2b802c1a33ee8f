"""The reader pod: a short-lived pod that mounts the storage, for a run without a running head."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trainyard.errors import ClusterError
from trainyard.labels import OWNER_LABELS, RUN_LABEL
from trainyard.platform import Platform
from trainyard.submission.current_status import HEAD_CONTAINER
from trainyard.submission.polling import comes_true
from trainyard.submission.run_folder.remote_folder import PodAccess, RemoteFolder

Object = dict[str, Any]

READER_CONTAINER = "reader"
"""The name of the reader pod's container."""

START_LIMIT_S = 300.0
"""For how many seconds a reader pod may take to start; its node may have to pull the image."""

LIFETIME_S = 3600
"""After how many seconds a reader pod ends if the launcher could not delete it."""

POLL_S = 0.5
"""Seconds between two requests for the state of a starting pod."""


def storage_pod(
    platform: Platform, name: str, labels: Mapping[str, str], lifetime_s: int
) -> Object:
    """Return the platform's pod that mounts the storage, without an image and a command.

    Its name is `name` and a random suffix. Kubernetes ends it after `lifetime_s` seconds.
    """
    pod = copy.deepcopy(platform.reader_pod)
    # Two pods of one run may exist at the same time.
    pod["metadata"]["name"] = f"{name}-{uuid.uuid4().hex[:8]}"
    pod["metadata"].setdefault("labels", {}).update(labels)
    # It has nothing to save when it is deleted.
    pod["spec"] |= {"activeDeadlineSeconds": lifetime_s, "terminationGracePeriodSeconds": 0}
    return pod


def reader_pod(platform: Platform, run: str) -> Object:
    """Return the reader pod for a run: it sleeps, and commands are executed in it."""
    pod = storage_pod(platform, f"{run}-reader", OWNER_LABELS | {RUN_LABEL: run}, LIFETIME_S)
    pod["spec"]["containers"][0].update(image=platform.image, command=["sleep", str(LIFETIME_S)])
    return pod


@contextmanager
def open_folder(
    cluster: PodAccess,
    platform: Platform,
    run: str,
    head: str | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[RemoteFolder]:
    """Open a run's folder through its head pod, or, without one, through a reader pod.

    The reader pod is deleted at the end. Raises ClusterError if it does not start.
    """
    if head is not None:
        yield RemoteFolder(cluster, platform, run, head, HEAD_CONTAINER)
        return
    pod = reader_pod(platform, run)
    name = pod["metadata"]["name"]
    cluster.create(pod)
    try:
        if not comes_true(
            lambda: _is_running(name, cluster.get("Pod", name)),
            limit_s=START_LIMIT_S,
            poll_s=POLL_S,
            clock=clock,
            sleep=sleep,
        ):
            raise ClusterError(
                f"reader pod {name} has not started after {START_LIMIT_S:g} s",
                f"Look at `kubectl describe pod {name} {cluster.options}`: image, storage claim, quota.",
                reason="Timeout",
            )
        yield RemoteFolder(cluster, platform, run, name, READER_CONTAINER)
    finally:
        cluster.delete("Pod", name)


def _is_running(name: str, pod: Object | None) -> bool:
    """Return whether the container is running. Raises ClusterError if the pod has ended or is gone."""
    if pod is None:
        raise ClusterError(
            f"reader pod {name} was deleted by another client", "Try again.", reason="NotFound"
        )
    for container in pod.get("status", {}).get("containerStatuses", []):
        if "terminated" in container["state"]:
            ended = container["state"]["terminated"]
            raise ClusterError(
                f"reader pod {name} ended at once: {ended.get('reason')} {ended.get('message', '')}"
            )
        if "running" in container["state"]:
            return True
    return False
