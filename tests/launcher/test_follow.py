"""Whoever follows sees each state and each line once, whatever happens to the connection."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from trainyard.cluster.follow import LOG_END_S, REFUSED_LIMIT_S, follow, follow_log, precise
from trainyard.errors import ClusterError, ClusterUnreachable

Object = dict[str, Any]
GONE = ClusterUnreachable("away")


class Scripted:
    """Answers to lists, watches and logs, one after the other; an exception is raised."""

    def __init__(self, *answers: Any, is_running: bool = True) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.is_running = is_running
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def _next(self, asked: str) -> Iterator[Any]:
        self.asked.append(asked)
        answer = self.answers.pop(0)
        for item in answer if isinstance(answer, list) else [answer]:
            if isinstance(item, Exception):
                raise item
            yield item

    def snapshot(
        self, kind: str, labels: Any = None, *, fields: str = ""
    ) -> tuple[list[Object], str]:
        return list(self._next("list")), "5"

    def watch(
        self, kind: str, labels: Any = None, *, fields: str = "", resource_version: str
    ) -> Iterator[Object]:
        return self._next(f"watch {resource_version}")

    def follow_log(
        self,
        pod: str,
        container: str,
        *,
        since_s: int | None = None,
        tail_lines: int | None = None,
        since_time: str = "",
    ) -> Iterator[str]:
        return self._next(f"log {since_time}")

    def get(self, kind: str, name: str) -> Object | None:
        state = {"running": {}} if self.is_running else {"terminated": {}}
        return {"status": {"containerStatuses": [{"name": "c", "state": state}]}}


def thing(name: str, version: int = 0) -> Object:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


def event(kind: str, name: str, version: int) -> Object:
    return {"type": kind, "object": thing(name, version)}


def states(cluster: Scripted, count: int) -> list[list[str]]:
    found = follow(cluster, "Pod", clock=cluster.clock, sleep=cluster.sleep)
    return [sorted(state) for state in islice(found, count)]


def test_a_state_is_told_at_first_and_after_each_change() -> None:
    events = [event("ADDED", "b", 6), event("MODIFIED", "a", 7), event("DELETED", "a", 8)]
    assert states(Scripted([thing("a")], events), 4) == [["a"], ["a", "b"], ["a", "b"], ["b"]]


def test_a_watch_that_ends_goes_on_at_its_last_bookmark() -> None:
    cluster = Scripted([], [event("BOOKMARK", "", 40)], [event("ADDED", "a", 41)])
    assert states(cluster, 2) == [[], ["a"]]
    assert cluster.asked == ["list", "watch 5", "watch 40"]


@pytest.mark.parametrize(
    "trouble", [GONE, ClusterError("410", reason="Expired"), ClusterError("503", reason="503")]
)
def test_what_was_missed_is_listed(trouble: Exception) -> None:
    cluster = Scripted([thing("a")], [trouble], [thing("b")])
    assert states(cluster, 2) == [["a"], ["b"]]
    assert cluster.asked == ["list", "watch 5", "list"]


def test_nothing_missed_is_nothing_told() -> None:
    cluster = Scripted([thing("a")], [GONE], [thing("a")], [event("ADDED", "b", 6)])
    assert states(cluster, 2) == [["a"], ["a", "b"]]


def test_a_refusal_at_the_first_question_is_final() -> None:
    with pytest.raises(ClusterError, match="no rights"):
        states(Scripted(ClusterError("no rights", reason="Forbidden")), 1)


def test_a_refusal_of_what_was_granted_before_is_borne_for_a_while() -> None:
    refusal = ClusterError("no rights", reason="Forbidden")
    assert states(Scripted([], [GONE], refusal, refusal, [thing("a")]), 2) == [[], ["a"]]
    with pytest.raises(ClusterError, match="no rights"):
        states(Scripted([], [GONE], *[refusal] * int(REFUSED_LIMIT_S * 2)), 2)


def lines(cluster: Scripted) -> list[str]:
    return list(follow_log(cluster, "p", "c", clock=cluster.clock, sleep=cluster.sleep))


def test_a_log_that_broke_off_goes_on_without_a_line_twice() -> None:
    cluster = Scripted(
        ["00:01.5Z one", "00:01.52Z two", GONE],
        ["00:01.5Z one", "00:01.52Z two", "00:01.6Z three"],
        is_running=False,
    )
    assert lines(cluster) == ["one", "two", "three"]
    assert cluster.asked == ["log ", "log 00:01.52Z"]


def test_a_stream_that_ends_before_its_container_is_opened_again() -> None:
    cluster = Scripted(["00:01Z one"], ["00:02Z two"], ClusterError("gone", reason="NotFound"))
    assert lines(cluster) == ["one", "two"]


def test_a_log_ends_with_its_node_although_the_api_server_still_has_the_container_as_running() -> (
    None
):
    cluster = Scripted(["00:01Z one"], *[["00:01Z one"]] * 100)
    assert lines(cluster) == ["one"]
    assert LOG_END_S < cluster.now < LOG_END_S + 3


def test_times_are_compared_as_times() -> None:
    assert precise("00:01.5Z") < precise("00:01.52Z") < precise("00:02Z")
