"""Files of a run's folder, read through a short-lived pod of the platform; it outlives the cluster."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from launcher.errors import ClusterError
from launcher.kuberay import OWNER_LABELS, RUN_LABEL
from launcher.platform import Platform

Object = dict[str, Any]

NO_SUCH_FILE = 4
"""Exit code of `python -m trainer.folder` for a file that is not there."""
READ_LIMIT_S = 120.0
POLL_S = 0.5
CONTAINER = "reader"


class Pods(Protocol):
    """What is needed of a cluster."""

    def create(self, body: Object) -> Object: ...
    def get(self, kind: str, name: str) -> Object | None: ...
    def delete(self, kind: str, name: str) -> None: ...
    def log(self, pod: str, container: str, since_s: int | None = None) -> str: ...


def reader_pod(platform: Platform, run: str, *file: str) -> Object:
    """The platform's reader pod, set to print one file of a run's folder, or to list its files."""
    pod = copy.deepcopy(platform.reader_pod)
    # A name of its own each time: two readers of one run must not meet.
    pod["metadata"]["name"] = f"{run}-reader-{uuid.uuid4().hex[:8]}"
    pod["metadata"].setdefault("labels", {}).update(OWNER_LABELS | {RUN_LABEL: run})
    endpoint = ["--endpoint", platform.storage.endpoint] if platform.storage.endpoint else []
    pod["spec"]["containers"][0].update(
        image=platform.image,
        command=["python", "-m", "trainer.folder"],
        args=["--path", platform.storage.path, *endpoint, run, *file],
    )
    return pod


def read_folder(
    cluster: Pods,
    platform: Platform,
    run: str,
    *file: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str | None:
    """The text of a file of the run's folder, or None if it is not there; without a file the list."""
    pod = reader_pod(platform, run, *file)
    name = pod["metadata"]["name"]
    cluster.create(pod)
    try:
        deadline = clock() + READ_LIMIT_S
        while (state := _ended(cluster.get("Pod", name))) is None:
            if clock() > deadline:
                raise ClusterError(
                    f"reader pod {name} has not ended after {READ_LIMIT_S:g} s",
                    f"See `kubectl describe pod {name}`: image, storage claim, quota.",
                    reason="Timeout",
                )
            sleep(POLL_S)
        if state["exitCode"] == NO_SUCH_FILE:
            return None
        text = cluster.log(name, CONTAINER)
        if state["exitCode"] != 0:
            raise ClusterError(f"reader pod {name} failed", *text.splitlines()[-3:])
        return text
    finally:
        cluster.delete("Pod", name)


def _ended(pod: Object | None) -> Object | None:
    """The terminated state of the reader's container, or None while it lives."""
    if pod is None:
        raise ClusterError("the reader pod was deleted by someone else", reason="NotFound")
    for container in pod.get("status", {}).get("containerStatuses", []):
        if "terminated" in container["state"]:
            state: Object = container["state"]["terminated"]
            return state
    return None
