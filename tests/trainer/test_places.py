"""Resources of a Ray cluster that workers reserve, and those that a lost worker group still holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from own_ray import own_ray
from ray.util.placement_group import placement_group

from trainyard_trainer.config.scaling import Scaling
from trainyard_trainer.errors import RunError
from trainyard_trainer.on_ray.controller.placement_groups import GiveBackPlaces, groups_of
from trainyard_trainer.user_code.torchrun import reserve_workers

ALL_CPUS = [{"CPU": 1.0}] * 2


@pytest.fixture
def two_cpus() -> Iterator[None]:
    with own_ray(num_cpus=len(ALL_CPUS)):
        yield


@pytest.mark.ci
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


@pytest.mark.ci
def test_workers_of_torchrun_without_free_resources_end_with_an_error_that_names_them(
    two_cpus: None,
) -> None:
    scaling = Scaling(num_workers=3, cpus_per_worker=1, use_gpu=False)
    with pytest.raises(RunError, match=r"3 workers \(CPU 1 each\) were not free within 1 s"):
        reserve_workers(scaling, limit_s=1)
