"""How long a run waits for a place for workers that were lost."""

from __future__ import annotations

import pytest
from ray.train.v2._internal.execution.controller.state import (
    InitializingState,
    ReschedulingState,
    RestartingState,
    RunningState,
    SchedulingState,
    TrainControllerState,
)
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2.api.exceptions import ControllerError

from trainyard_trainer.on_ray.controller.replacement import NotReplaced, ReplacementLimit

LOST = ControllerError(RuntimeError("a worker was lost"))
SCHEDULING = SchedulingState(ResizeDecision(num_workers=2, resources_per_worker={}))
RESCHEDULING, RESTARTING, RUNNING = ReschedulingState(LOST), RestartingState(LOST), RunningState()


def waited(*states: tuple[float, TrainControllerState]) -> None:
    """What a limit of 100 s makes of states, each with its time in seconds."""
    now = 0.0
    limit = ReplacementLimit(100.0, now=lambda: now)
    previous: TrainControllerState = InitializingState()
    for now, state in states:  # noqa: B007 - the limit's clock reads it
        limit.after_controller_state_update(previous, state)
        previous = state


def test_a_run_waits_for_a_place_for_so_long_and_no_longer() -> None:
    waiting = (0.0, RUNNING), (500.0, RESTARTING), (501.0, SCHEDULING), (599.0, RESCHEDULING)
    waited(*waiting)
    with pytest.raises(NotReplaced, match=r"within 100 s \(faults.replacement_timeout_s 100\)"):
        waited(*waiting, (600.0, RESCHEDULING))


def test_it_waits_anew_once_it_has_trained() -> None:
    waited((0.0, RESTARTING), (60.0, RUNNING), (120.0, RESTARTING), (200.0, RESCHEDULING))


def test_a_first_worker_group_is_waited_for_just_as_long() -> None:
    with pytest.raises(NotReplaced):
        waited((0.0, SCHEDULING), (60.0, RESCHEDULING), (160.0, RESCHEDULING))
