"""Continue after workers were lost: the others keep their state, and give it to the replacements.

Workers with DDP hold the same weights and optimizer state after each step. When one of them is lost, the
others leave the process group, wait for the replacement, and join a new process group with it. They may be
one step apart, because a collective operation can succeed on one worker and fail on another:

* The workers agree on the newest step that any of them has completed. A worker that had not completed it has
  taken part in its exchange of gradients, so it takes over the resulting weights from one that has.
* If no worker has completed the step that failed, all repeat it with the batch that they have.
* What a worker alone has, such as its loss sums, is in files that outlive it: `own_state`.
* Rank 0 decides whether the end of an epoch is repeated: it alone records metrics and saves checkpoints. If
  it is the one that was lost, the end of the newest epoch is repeated unless a step has followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trainyard_trainer.kept_files import KeptFiles
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.measurements.progress import Length, Trained
from trainyard_trainer.run_folder.measurements.startup import Startup


class Regrouping(Protocol):
    """How a worker joins a new process group after another worker was lost."""

    is_replacement: bool
    """Whether this worker takes the place of a lost one."""
    kept: KeptFiles | None
    """The files of this node with what workers alone have; None if lost workers are not replaced."""

    def is_loss(self, error: BaseException) -> bool:
        """Whether an error says that another worker was lost, and lost workers are replaced."""

    def regroup(self, error: BaseException) -> None:
        """Leave the process group, and join the next one, with the replacement.

        Raises `error` if no replacement comes in time: the worker group is restarted then.
        """

    def finish(self) -> None:
        """Wait until all workers have trained to the end, and rank 0 has saved; then refuse another group.

        Raises an error of `is_loss` if a worker was lost before.
        """

    def decline(self) -> None:
        """Refuse to join another process group from the beginning: all errors end the worker."""


class FixedGroup:
    """The workers of a process group in which no worker is replaced."""

    is_replacement = False
    kept: KeptFiles | None = None

    def is_loss(self, error: BaseException) -> bool:
        """Return False: any error ends the worker."""
        return False

    def regroup(self, error: BaseException) -> None:
        """Raise the error: no worker is replaced."""
        raise error

    def finish(self) -> None:
        """Return at once: nobody asks this worker to join another process group."""

    def decline(self) -> None:
        """Return at once: nobody asks this worker to join another process group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How far a worker has come."""

    trained: Trained
    """The progress up to the newest step. At the end of an epoch that is not validated, all steps of the
    epoch count as steps of the epoch under way."""
    is_unsaved: bool
    """Whether an epoch has ended, and it is still to be decided whether to save a checkpoint."""
    epoch_end: Trained | None
    """The progress at the end of the newest epoch, before its validation; None if no epoch has ended."""

    def after_step(self, length: Length) -> Position:
        """Return the position one step later."""
        trained, steps = self.trained, self.trained.steps_in_epoch + 1
        return replace(
            self,
            trained=replace(
                trained,
                step=trained.step + 1,
                samples=length.samples_until(trained.epoch, steps),
                steps_in_epoch=steps,
            ),
        )

    def before_epoch_end(self) -> Position:
        """Return the position before the validation of the newest epoch, unless a step has followed it."""
        if self.trained.steps_in_epoch or self.epoch_end is None:
            return self
        return replace(self, trained=self.epoch_end, is_unsaved=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """What the workers of a new process group have agreed on."""

    position: Position
    """Where all continue."""
    source: int
    """The rank of a worker whose weights and optimizer state are those of the position."""
    replaced: tuple[int, ...]
    """The ranks of the workers that are new."""
    workers: list[Mapping[str, Any]]
    """Where the worker of each rank runs, as workers.json has it."""

    @property
    def nodes(self) -> list[str]:
        """Return the names of the workers' nodes, by rank."""
        return [each["node"] for each in self.workers]


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStart:
    """How the worker group has started, which its worker 0 reports in the end."""

    resumed_from: str | None
    """The name of the checkpoint; None if training has started from scratch."""
    startup: Startup


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """What a new worker, or one that has missed the end of a step, gets from another worker."""

    weights: dict[str, Any]
    state: dict[str, Any]
    """The learner's state beside the weights."""
    group_start: GroupStart


def agree(
    worker: Worker, length: Length, position: Position | None, facts: Mapping[str, Any]
) -> Agreement:
    """Agree on where to continue. All workers must call it; `position` is None on a new worker."""
    found: list[tuple[Position | None, Mapping[str, Any]]] = worker.gathered((position, facts))
    known = {rank: each for rank, (each, _) in enumerate(found) if each is not None}
    newest = max(each.trained.step for each in known.values())
    source = min(rank for rank, each in known.items() if each.trained.step == newest)
    if 0 not in known:
        agreed = known[source].before_epoch_end()
    elif known[0].trained.step == newest:
        agreed = known[0]
    else:
        agreed = known[0].after_step(length)
    return Agreement(
        position=agreed,
        source=source,
        replaced=tuple(rank for rank in range(len(found)) if rank not in known),
        workers=[each for _, each in found],
    )
