"""Places that a worker group has left taken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from own_ray import own_ray
from ray.util.placement_group import placement_group

from trainyard_trainer.on_ray.placement_groups import GiveBackPlaces, groups_of

ALL_CPUS = [{"CPU": 1.0}] * 2


@pytest.fixture
def two_cpus() -> Iterator[None]:
    with own_ray(num_cpus=len(ALL_CPUS)):
        yield


def test_the_next_worker_group_gets_the_places_that_one_before_has_left_taken(
    two_cpus: None, capsys: pytest.CaptureFixture[str]
) -> None:
    left = placement_group(ALL_CPUS)
    assert left.wait(60)
    assert not placement_group(ALL_CPUS).wait(1)
    GiveBackPlaces().before_worker_group_start(None)
    assert left.id.hex() in capsys.readouterr().out
    assert placement_group(ALL_CPUS).wait(60)


def test_only_what_the_job_holds_or_awaits_is_given_back() -> None:
    ours, other = "02000000", "03000000"
    states = {"a": "CREATED", "b": "PENDING", "c": "RESCHEDULING", "d": "REMOVED"}
    table = {
        group + job: {"state": state} for group, state in states.items() for job in (ours, other)
    }
    assert groups_of(ours, table) == [group + ours for group in "abc"]
