"""Follow objects and logs of a cluster without gaps, although watches expire and connections break.

The functions yield each state and each log line once. They reconnect until the API server has not answered
for `SILENT_LIMIT_S`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from trainyard.errors import ClusterError, ClusterUnreachable

Object = dict[str, Any]
ObjectsByName = dict[str, Object]
"""The followed objects by their names."""

LOG_END_S = 60.0
"""Seconds for which a log stream ends without a new line before the log has ended."""

SILENT_LIMIT_S = 300.0
"""For how many seconds an API server may not answer."""
REFUSED_LIMIT_S = 30.0
"""For how many seconds an API server that has just restarted may refuse what it allowed before."""
RETRY_S = 1.0
"""Seconds between two attempts to connect, on average."""
TRANSIENT = {"500", "502", "503", "504", "InternalError", "ServiceUnavailable", "Timeout"} | {
    "TooManyRequests",
    "429",
}


class WatchAccess(Protocol):
    """The methods of `Cluster` with which objects and logs are followed."""

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
        self,
        pod: str,
        container: str,
        *,
        since_s: int | None = None,
        tail_lines: int | None = None,
        since_time: str = "",
    ) -> Iterator[str]: ...


class Patience:
    """Decides how long to retry while a cluster does not answer."""

    def __init__(self, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._clock = clock
        self._sleep = sleep
        self._answered_at: float | None = None
        self._began = clock()

    def answered(self) -> None:
        """Note that the cluster has answered just now."""
        self._answered_at = self._clock()

    def wait(self, error: ClusterError) -> None:
        """Wait before the next attempt, or raise the error if the cluster was away for too long."""
        is_away = isinstance(error, ClusterUnreachable) or error.reason in TRANSIENT
        if self._answered_at is None and not isinstance(error, ClusterUnreachable):
            raise error
        since = self._began if self._answered_at is None else self._answered_at
        if self._clock() - since > (SILENT_LIMIT_S if is_away else REFUSED_LIMIT_S):
            raise error
        # Random, so that not all clients of a restarted API server reconnect at the same moment.
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
    """Yield all selected objects, and again after each change of one of them, without end.

    It lists the objects once and then watches them. If the watch breaks or its version expires, a new list
    shows what was missed. Raises ClusterError if the cluster refuses, or does not answer for SILENT_LIMIT_S.
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
            sleep(RETRY_S)  # the API server ended the watch: continue from this version
        except ClusterError as error:
            version = ""  # list again, which shows what was missed
            if error.reason != "Expired":
                patience.wait(error)


def follow_log(
    cluster: WatchAccess,
    pod: str,
    container: str,
    *,
    since_s: int | None = None,
    tail_lines: int | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """Yield each line of a container's log once, until the container has ended or is gone.

    `since_s` and `tail_lines` leave out what is older than so many seconds, or than the last lines.

    The log has also ended if its node says so for LOG_END_S, while the API server still has the container as
    running: a node that cannot report to the API server can still serve logs.
    """
    patience = Patience(clock, sleep)
    seen = ""
    ended_at: float | None = None
    while True:
        try:
            lines = (
                cluster.follow_log(pod, container, since_time=seen)
                if seen
                else cluster.follow_log(pod, container, since_s=since_s, tail_lines=tail_lines)
            )
            for line in lines:
                patience.answered()
                moment, _, text = line.partition(" ")
                if seen and precise(moment) <= precise(seen):
                    continue  # the API takes whole seconds
                seen, ended_at = moment, None
                yield text
            # The end of the stream may be that of the API server, too.
            if not _is_running(cluster.get("Pod", pod), container):
                return
            patience.answered()
            ended_at = clock() if ended_at is None else ended_at
            if clock() - ended_at > LOG_END_S:
                return
            sleep(RETRY_S)
        except ClusterError as error:
            if error.reason in ("NotFound", "BadRequest"):
                return  # the pod is gone, or its container has not begun
            patience.wait(error)


def precise(moment: str) -> str:
    """Return a log timestamp with nine decimals, so that timestamps compare as text.

    The API cuts trailing zeros: `...:05.1Z` becomes `...:05.100000000`.
    """
    whole, _, fraction = moment.removesuffix("Z").partition(".")
    return f"{whole}.{fraction:0<9}"


def _is_running(pod: Object | None, container: str) -> bool:
    statuses = [] if pod is None else pod.get("status", {}).get("containerStatuses", [])
    return any(each["name"] == container and "running" in each["state"] for each in statuses)
