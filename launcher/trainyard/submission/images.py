"""Record which digests the nodes resolved the image of a run to.

Only the API server knows it, which no pod of a run may ask. So a launcher that watches the run writes it to
the run's folder, and the driver takes it into the run's record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from trainyard.errors import ClusterError
from trainyard.labels import OWNER_LABELS, RUN_LABEL
from trainyard.submission.current_status import HEAD_CONTAINER
from trainyard.submission.overview import PodLister
from trainyard.submission.status import RunStatus
from trainyard_trainer.run_files import names

Object = dict[str, Any]

RAY_CONTAINERS = (HEAD_CONTAINER, "ray-worker")
"""The containers whose image is the run's."""


class ImagesFolder(Protocol):
    """The methods of a run's folder with which images.json is changed; see `RemoteFolder`."""

    def read(self, file: str) -> str | None: ...
    def put(self, file: str, data: bytes, sha256: str) -> None: ...


OpenFolder = Callable[[], AbstractContextManager[ImagesFolder]]


def recording_images(
    cluster: PodLister,
    run: str,
    statuses: Iterable[RunStatus],
    open_folder: OpenFolder,
    say: Callable[[str], object] = lambda line: None,
) -> Iterator[RunStatus]:
    """Yield the statuses of a submission, and record the digests once for each attempt that trains."""
    recorded = 0
    for status in statuses:
        if status.phase == "running" and status.progress and status.attempts > recorded:
            recorded = status.attempts
            try:
                record_images(cluster, run, open_folder)
            except ClusterError as error:
                say(f"the digests of the images of run {run} were not recorded: {error.what}")
        yield status


def record_images(cluster: PodLister, run: str, open_folder: OpenFolder) -> None:
    """Add the digests of the images of a run's pods to its folder. Raises ClusterError."""
    digests = digests_of(cluster.list("Pod", OWNER_LABELS | {RUN_LABEL: run}))
    with open_folder() as folder:
        text = folder.read(names.IMAGES)
        before = {} if text is None else json.loads(text)
        if not digests.items() <= before.items():
            data = json.dumps(before | digests, indent=2).encode()
            folder.put(names.IMAGES, data, hashlib.sha256(data).hexdigest())


def digests_of(pods: Iterable[Object]) -> dict[str, str]:
    """Return the digest of the image of each pod whose Ray container has started.

    An image that a node has loaded without a registry has none: the node then reports the hash of its config.
    """
    return {
        pod["metadata"]["name"]: container["imageID"].rpartition("://")[2].rpartition("@")[2]
        for pod in pods
        for container in pod.get("status", {}).get("containerStatuses", [])
        if container["name"] in RAY_CONTAINERS and container.get("imageID")
    }
