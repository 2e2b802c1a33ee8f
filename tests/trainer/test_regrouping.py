"""Workers that continue in a new process group after a collective operation has failed on one of them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed
from training import final_weights, metrics, run_processes, same, small_config, task_of

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.engine.kept_sums import SLOTS, KeptSums
from trainyard_trainer.engine.learner import Learner
from trainyard_trainer.engine.regrouping import Position, agree
from trainyard_trainer.engine.step_sync import StepSync
from trainyard_trainer.engine.worker import work
from trainyard_trainer.errors import RunError
from trainyard_trainer.on_ray.controller.membership import (
    GroupClosed,
    MeetingPoint,
    Membership,
)
from trainyard_trainer.parallel.strategy import DdpStrategy
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.measurements.progress import Length, Trained

CLOSED = "[gloo/transport/tcp/pair.cc] Connection closed by peer"
"""What gloo says."""

WORKERS = 3
"""Of two workers, the order in which gradients are summed does not matter."""

MOMENTS: dict[str, tuple[type, str, bool]] = {
    "before its gradients are exchanged": (DdpStrategy, "backward", False),
    "when others may have completed the step": (Learner, "_optimizer_step", False),
    "when others may know the signals": (StepSync, "exchange", True),
    "when others may have validated": (Learner, "validate", True),
}
"""Where a worker fails: in which method, and whether after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A failure of one worker."""

    moment: str
    rank: int
    call: int
    """At which call of the method on this worker."""


class InvitesItself(Membership):
    """A worker that needs no controller: all workers find out that the process group is broken."""

    generation = 0

    def regroup(self, error: BaseException) -> None:
        self.generation += 1
        self.invite(self.generation)
        super().regroup(error)


@contextmanager
def failing(fault: Fault) -> Iterator[None]:
    owner, name, is_after = MOMENTS[fault.moment]
    method, calls = getattr(owner, name), 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fault.call and not is_after:
            raise RuntimeError(CLOSED)
        result = method(*arguments, **options)
        if calls == fault.call:
            raise RuntimeError(CLOSED)
        return result

    with patch.object(owner, name, call):
        yield


def membership(rank: int, world_size: int, port: int, folder: Path) -> InvitesItself:
    meeting = MeetingPoint(backend="gloo", timeout_s=60, address="127.0.0.1", port=port)
    return InvitesItself(
        meeting, folder / f"sums-{rank}", rank=rank, world_size=world_size, generation=0
    )


def train_with_faults(
    rank: int, port: int, folder: Path, config: TrainerConfig, faults: Sequence[Fault]
) -> None:
    """One of the processes that train a run."""
    size = config.scaling.num_workers
    group = membership(rank, size, port, folder)
    worker = Worker(rank=rank, world_size=size, device=torch.device("cpu"))
    task = worker.from_rank_zero(task_of(config) if rank == 0 else None)
    with ExitStack() as stack:
        for fault in faults:
            if fault.rank == rank:
                stack.enter_context(failing(fault))
        work(task, worker, regrouping=group)
    assert (group.generation > 0) == bool(faults)
    distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def train(storage: Path, faults: Sequence[Fault], **changes: Any) -> TrainerConfig:
    config = small_config(storage, scaling__num_workers=WORKERS, **changes)
    storage.mkdir()
    run_processes(train_with_faults, (free_port(), storage, config, faults), WORKERS)
    return config


def epoch_ends(config: TrainerConfig) -> list[dict[str, Any]]:
    """What depends on the training alone."""
    names = ("epoch", "step", "samples", "loss", "accuracy", "val_loss", "val_accuracy")
    return [{name: record[name] for name in names} for record in metrics(config, "epoch")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("batches", [{}, {"train__micro_batch_size": 21}], ids=["whole", "parts"])
def test_workers_that_regroup_have_the_weights_and_metrics_of_an_undisturbed_run(
    tmp_path: Path, batches: dict[str, Any]
) -> None:
    changes = {
        "train__epochs": 5,
        "train__global_batch_size": 126,
        "train__ema_decay": 0.9,
        "checkpoint__every_samples": 300,
        "data__drop_last": False,
        **batches,
    }
    # Validations count from 1; each other worker fails in the epoch of its own.
    calls = dict(zip(MOMENTS, (7, 19, 2, 2), strict=True))
    faults = [
        Fault(moment=moment, rank=rank, call=call + 4 * rank if call > 2 else call + rank)
        for moment, call in calls.items()
        for rank in range(WORKERS)
    ]
    disturbed = train(tmp_path / "disturbed", faults, **changes)
    whole = train(tmp_path / "whole", [], **changes)
    assert same(final_weights(disturbed), final_weights(whole))
    assert epoch_ends(disturbed) == epoch_ends(whole)
    steps = [record["step"] for record in metrics(disturbed)]
    assert steps == sorted(set(steps))


# What the workers agree on.

LENGTH = Length(epochs=3, num_samples=1000, global_batch_size=100, drop_last=False)


class Told(Worker):
    """A worker that is told what the others have passed."""

    def __init__(self, others: list[Any]) -> None:
        object.__setattr__(self, "others", others)

    def gathered(self, value: Any) -> list[Any]:
        others: list[Any] = self.others  # type: ignore[attr-defined]
        return others


def position(step: int, *, is_unsaved: bool = False) -> Position:
    epoch, steps = divmod(step, LENGTH.steps_per_epoch)
    trained = Trained(epoch=epoch, step=step, samples=step * 100, steps_in_epoch=steps)
    return Position(trained=trained, is_unsaved=is_unsaved, first_step=0)


@pytest.mark.parametrize(
    ("steps", "agreed", "source", "replaced"),
    [
        ([7, None, 7], 7, 0, (1,)),
        ([7, 8, None], 8, 1, (2,)),
        ([8, 7, None], 8, 0, (2,)),
        ([8, None, None], 8, 0, (1, 2)),
    ],
)
def test_the_newest_step_that_any_worker_has_completed_counts(
    steps: list[int | None], agreed: int, source: int, replaced: tuple[int, ...]
) -> None:
    positions = [None if step is None else position(step) for step in steps]
    worker = Told([(each, {"rank": rank}) for rank, each in enumerate(positions)])
    agreement = agree(worker, LENGTH, None, {})
    assert agreement.position == position(agreed)
    assert (agreement.source, agreement.replaced) == (source, replaced)
    assert [each["rank"] for each in agreement.workers] == [0, 1, 2]


def test_rank_0_decides_whether_the_end_of_an_epoch_is_repeated() -> None:
    behind = Position(
        trained=Trained(epoch=0, step=10, samples=1000, steps_in_epoch=10),
        is_unsaved=False,
        first_step=0,
    )
    agreement = agree(Told([(behind, {}), (position(10), {})]), LENGTH, None, {})
    assert agreement.position == behind


# Invitations.


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Membership]:
    yield membership(0, 1, free_port(), tmp_path)
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


def test_a_worker_takes_one_invitation_at_a_time_and_none_after_its_end(member: Membership) -> None:
    assert member.invite(1)
    assert not member.invite(2)
    with pytest.raises(GroupClosed) as closed:
        member.finish()
    assert member.is_loss(closed.value)
    Membership.regroup(member, closed.value)
    assert distributed.is_initialized()
    member.finish()
    assert not member.invite(3)


def test_a_worker_that_is_not_invited_fails_with_the_error_of_the_operation(
    member: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard_trainer.on_ray.controller.membership.INVITATION_S", 0.1)
    error = RuntimeError(CLOSED)
    with pytest.raises(RuntimeError) as raised:
        Membership.regroup(member, error)
    assert raised.value is error
    assert not distributed.is_initialized()


# Loss sums.


def test_the_sums_of_the_last_steps_are_found_by_another_process(tmp_path: Path) -> None:
    path, sums = tmp_path / "sums", torch.tensor([1.5, 2.0], dtype=torch.float64)
    kept = KeptSums(path, 2, is_new=True)
    for step in range(10):
        kept.write(step, sums * step)
    found = KeptSums(path, 2, is_new=False)
    for step in range(10 - SLOTS, 10):
        assert torch.equal(found.read(step), sums * step)


def test_sums_that_are_not_kept_are_an_error(tmp_path: Path) -> None:
    find: Callable[[], KeptSums] = lambda: KeptSums(tmp_path / "sums", 2, is_new=False)  # noqa: E731
    with pytest.raises(RunError, match="is gone"):
        find()
    KeptSums(tmp_path / "sums", 2, is_new=True).write(7, torch.zeros(2, dtype=torch.float64))
    for step in (3, 8):
        with pytest.raises(RunError, match=f"after step {step} are not kept"):
            find().read(step)
