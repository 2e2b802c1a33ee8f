"""How workers agree on where to continue after the loss of one, and what they keep for that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from replaced_workers import free_port
from torch import distributed
from training import small_config

from trainyard_trainer.config.replaceable import replaces_workers, why_not_replaced
from trainyard_trainer.engine.kept_state import KeptState, StateFile
from trainyard_trainer.engine.own_state import SLOTS
from trainyard_trainer.engine.regrouping import Agreement, Position, agree
from trainyard_trainer.errors import RunError
from trainyard_trainer.kept_files import KeptFiles
from trainyard_trainer.on_ray.controller.membership import (
    GroupClosed,
    MeetingPoint,
    Membership,
)
from trainyard_trainer.on_ray.controller.peer_connections import open_connections, open_files
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.measurements.progress import Length, Trained

CLOSED = "[gloo/transport/tcp/pair.cc] Connection closed by peer"
"""What gloo says."""

# Which runs replace workers.


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"scaling__num_workers": 1}, "the run has one worker"),
        ({"scaling__use_gpu": True}, "the run has GPUs"),
        ({"scaling__min_workers": 1}, "the number of workers is a range"),
        ({"train__strategy": "fsdp2"}, "train.strategy = fsdp2"),
        ({"train__compile": True}, "train.compile = true"),
        ({"data__loader": "ray"}, "data.loader = ray"),
    ],
)
def test_what_of_a_run_makes_it_impossible_to_replace_workers(
    tmp_path: Path, changes: dict[str, Any], reason: str | None
) -> None:
    config = small_config(tmp_path, **{"scaling__num_workers": 2} | changes)
    assert why_not_replaced(config) == reason
    assert not replaces_workers(config)
    wanted = small_config(
        tmp_path, **{"scaling__num_workers": 2, "faults__replace_workers": True} | changes
    )
    assert replaces_workers(wanted) == (reason is None)


# What the workers agree on.

LENGTH = Length(epochs=3, num_samples=1000, global_batch_size=100, drop_last=False)


class Told(Worker):
    """A worker that is told what the others have passed."""

    def __init__(self, others: list[Any]) -> None:
        object.__setattr__(self, "others", others)

    def gathered(self, value: Any) -> list[Any]:
        others: list[Any] = self.others  # type: ignore[attr-defined]
        return others


def position(step: int, *, is_unsaved: bool = False, at_end: bool = False) -> Position:
    """Return the position after so many steps; at the end of an epoch before its validation, or after it."""
    epoch, steps = divmod(step, LENGTH.steps_per_epoch)
    end = Trained(epoch=epoch - 1, step=step, samples=step * 100, steps_in_epoch=10)
    trained = Trained(epoch=epoch, step=step, samples=step * 100, steps_in_epoch=steps)
    return Position(
        trained=end if at_end else trained,
        is_unsaved=is_unsaved,
        epoch_end=end if epoch and not at_end else None,
    )


def agreed(positions: list[Position | None]) -> Agreement:
    worker = Told([(each, {"rank": rank}) for rank, each in enumerate(positions)])
    return agree(worker, LENGTH, None, {})


@pytest.mark.parametrize(
    ("steps", "newest", "source", "replaced"),
    [
        ([7, None, 7], 7, 0, (1,)),
        ([7, 8, None], 8, 1, (2,)),
        ([8, 7, None], 8, 0, (2,)),
        ([8, None, None], 8, 0, (1, 2)),
        ([None, 8, 7], 8, 1, (0,)),
        ([None, None, 7], 7, 2, (0, 1)),
    ],
)
def test_the_newest_step_that_any_worker_has_completed_counts(
    steps: list[int | None], newest: int, source: int, replaced: tuple[int, ...]
) -> None:
    agreement = agreed([None if step is None else position(step) for step in steps])
    assert agreement.position == position(newest)
    assert (agreement.source, agreement.replaced) == (source, replaced)
    assert [each["rank"] for each in agreement.workers] == [0, 1, 2]


def test_worker_0_decides_whether_the_end_of_an_epoch_is_repeated() -> None:
    before, after = position(10, at_end=True), position(10, is_unsaved=True)
    assert agreed([before, after, None]).position == before
    assert agreed([after, before, None]).position == after


@pytest.mark.parametrize("is_unsaved", [True, False])
def test_the_end_of_an_epoch_is_repeated_if_worker_0_was_lost_after_it(is_unsaved: bool) -> None:
    found = agreed([None, position(10, is_unsaved=is_unsaved)]).position
    assert (found.trained, found.is_unsaved) == (position(10, at_end=True).trained, False)


# Invitations.


def meeting(generation: int, port: int) -> MeetingPoint:
    return MeetingPoint(
        backend="gloo", timeout_s=60, address="127.0.0.1", port=port, generation=generation
    )


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Membership]:
    yield Membership(meeting(0, free_port()), KeptFiles(tmp_path), rank=0, world_size=1)
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("text", "is_loss"),
    [
        (f"{CLOSED} [127.0.0.1]:1234", True),
        ("[third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]: reset", True),
        ("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 900000ms", False),
        ("my file: Read error", False),
    ],
)
def test_only_a_broken_connection_to_another_worker_is_the_loss_of_it(
    member: Membership, text: str, is_loss: bool
) -> None:
    assert member.is_loss(RuntimeError(text)) is is_loss


def test_a_worker_goes_to_the_newest_process_group_and_to_none_after_its_end(
    member: Membership,
) -> None:
    lost, port = RuntimeError(CLOSED), free_port()
    assert member.invite(meeting(1, port))
    with pytest.raises(GroupClosed) as closed:
        member.finish()
    assert member.is_loss(closed.value)
    assert member.invite(meeting(2, port))
    member.regroup(lost)
    assert distributed.is_initialized()
    member.finish()
    assert not member.invite(meeting(3, port))


def test_a_worker_that_declines_takes_a_loss_as_its_own_failure(member: Membership) -> None:
    member.decline()
    assert not member.invite(meeting(1, free_port()))
    assert not member.is_loss(RuntimeError(CLOSED))


def test_a_worker_that_is_not_invited_fails_with_the_error_of_the_operation(
    member: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard_trainer.on_ray.controller.membership.INVITATION_S", 0.1)
    error = RuntimeError(CLOSED)
    with pytest.raises(RuntimeError) as raised:
        member.regroup(error)
    assert raised.value is error
    assert not distributed.is_initialized()


# What a worker alone has.


def own_state(step: int) -> list[torch.Tensor]:
    return [
        torch.tensor([1.5, 2.0], dtype=torch.float64) * step,
        torch.tensor(step, dtype=torch.int64),
        torch.empty(0),
        torch.full((3,), step, dtype=torch.bfloat16),
        torch.full((2, 2), step * 1j, dtype=torch.complex64),
    ]


def test_the_state_after_the_last_steps_is_found_by_another_process(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    kept = KeptState(path, own_state(0), slots=SLOTS)
    for step in range(10):
        kept.write(step, own_state(step))
    found = KeptState(path, own_state(0), slots=SLOTS)
    for step in range(10 - SLOTS, 10):
        assert all(map(torch.equal, found.read(step), own_state(step)))


def test_state_that_is_not_kept_is_an_error(tmp_path: Path) -> None:
    kept = KeptState(tmp_path / "kept", own_state(0), slots=SLOTS)
    kept.write(7, own_state(7))
    for step in (0, 3, 8):
        with pytest.raises(RunError, match=f"after step {step} is not kept"):
            kept.read(step)


def test_a_file_with_states_of_another_size_becomes_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    KeptState(path, own_state(0), slots=SLOTS).write(7, own_state(7))
    assert StateFile.found(path, slots=SLOTS).steps() == [7]
    assert KeptState(path, own_state(0)[:1], slots=SLOTS).steps() == []


# Connections.


def test_looking_for_connections_leaves_no_file_open() -> None:
    before = open_files()
    open_connections()
    assert open_files() == before
