"""What goes on in a cluster, for as long as somebody looks: objects and logs.

One place knows that watches expire, connections drop and API servers restart: whoever follows sees states
and lines, each once, until the deadline of a cluster that does not come back.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from trainyard.errors import ClusterError, ClusterUnreachable

Object = dict[str, Any]
ObjectsByName = dict[str, Object]
"""Objects by name."""

SILENT_LIMIT_S = 300.0
"""How long an API server may be away."""
REFUSED_LIMIT_S = 30.0
"""How long it may refuse what it granted before: after its start it knows some rights and kinds late."""
RETRY_S = 1.0
TRANSIENT = {"500", "502", "503", "504", "InternalError", "ServiceUnavailable", "Timeout"} | {
    "TooManyRequests",
    "429",
}


class WatchAccess(Protocol):
    """What is needed of a cluster."""

    def get(self, kind: str, name: str) -> Object | None: ...
    def snapshot(
        self, kind: str, labels: Mapping[str, str | None] | None = None, *, fields: str = ""
    ) -> tuple[list[Object], str]: ...
    def watch(
        self,
        kind: str,
        labels: Mapping[str, str | None] | None = None,
        *,
        fields: str = "",
        resource_version: str,
    ) -> Iterator[Object]: ...
    def follow_log(
        self, pod: str, container: str, *, since_s: int | None = None, since_time: str = ""
    ) -> Iterator[str]: ...


class Patience:
    """How long to go on with a cluster that fails to answer; it was answered when it is made."""

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._clock = clock
        self._sleep = sleep
        self._answered_at: float | None = None
        self._began = clock()

    def answered(self) -> None:
        """It answered."""
        self._answered_at = self._clock()

    def wait(self, error: ClusterError) -> None:
        """Wait before the next attempt; raises the error where waiting is of no use any more."""
        is_away = isinstance(error, ClusterUnreachable) or error.reason in TRANSIENT
        if self._answered_at is None and not isinstance(error, ClusterUnreachable):
            raise error
        since = self._began if self._answered_at is None else self._answered_at
        if self._clock() - since > (SILENT_LIMIT_S if is_away else REFUSED_LIMIT_S):
            raise error
        # Not all who lost the same API server come back in the same moment.
        self._sleep(RETRY_S * random.uniform(0.75, 1.25))


def follow(
    cluster: WatchAccess,
    kind: str,
    labels: Mapping[str, str | None] | None = None,
    *,
    fields: str = "",
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[ObjectsByName]:
    """All objects that are selected, again after each change of one of them; without an end.

    A list, and then one watch. Where the watch ends, or its version is forgotten, the list tells what
    was missed. Raises ClusterError when the cluster refuses, or is away for SILENT_LIMIT_S.
    """
    patience = Patience(clock, sleep)
    state: ObjectsByName | None = None
    version = ""
    while True:
        try:
            if not version:
                found, version = cluster.snapshot(kind, labels, fields=fields)
                patience.answered()
                listed = {item["metadata"]["name"]: item for item in found}
                if listed != state:
                    state = listed
                    yield dict(state)
            assert state is not None
            for event in cluster.watch(kind, labels, fields=fields, resource_version=version):
                patience.answered()
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] == "BOOKMARK":
                    continue
                name = event["object"]["metadata"]["name"]
                if event["type"] == "DELETED":
                    state.pop(name, None)
                else:
                    state[name] = event["object"]
                yield dict(state)
            sleep(RETRY_S)  # ended in good order: the next one goes on from here
        except ClusterError as error:
            version = ""  # the list that follows makes up for whatever was missed
            if error.reason != "Expired":
                patience.wait(error)


def follow_log(
    cluster: WatchAccess,
    pod: str,
    container: str,
    *,
    since_s: int | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """The lines of a container as they come, each once, until it has ended or is gone."""
    patience = Patience(clock, sleep)
    seen = ""
    while True:
        try:
            lines = (
                cluster.follow_log(pod, container, since_time=seen)
                if seen
                else cluster.follow_log(pod, container, since_s=since_s)
            )
            for line in lines:
                patience.answered()
                moment, _, text = line.partition(" ")
                if seen and precise(moment) <= precise(seen):
                    continue  # the API takes whole seconds
                seen = moment
                yield text
            # The end of the stream may be that of the API server, too.
            if not _is_running(cluster.get("Pod", pod), container):
                return
            patience.answered()
            sleep(RETRY_S)
        except ClusterError as error:
            if error.reason in ("NotFound", "BadRequest"):
                return  # the pod is gone, or its container has not begun
            patience.wait(error)


def precise(moment: str) -> str:
    """`...:05.1Z` -> `...:05.100000000`: times of a log, which are cut at their last zero, in order."""
    whole, _, fraction = moment.removesuffix("Z").partition(".")
    return f"{whole}.{fraction:0<9}"


def _is_running(pod: Object | None, container: str) -> bool:
    statuses = [] if pod is None else pod.get("status", {}).get("containerStatuses", [])
    return any(each["name"] == container and "running" in each["state"] for each in statuses)
