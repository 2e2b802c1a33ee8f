"""The state of a worker after its newest steps, in a file that outlives the worker's process.

With DDP it is what a worker alone has: see `own_state`. With a sharded model it is the worker's shards as
well: see `state_copies`. Copies on other nodes: see `neighbours`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from trainyard_trainer.errors import RunError

NO_STEP = 0
"""What a slot without a state has in place of the number of its step plus 1: a new file has zeros."""

ALIGNMENT = 16
"""Each tensor begins at a multiple of this number of bytes: the size of the largest data type."""

SLOT_HEAD = ALIGNMENT
"""The bytes at the beginning of a slot, with the number of its step plus 1."""


class StateFile:
    """A file in the memory of the machine with several slots, each with the state after one step, as bytes.

    A slot begins with the number of its step, in SLOT_HEAD bytes. It has none while the slot is written, so
    that a kill in between leaves no wrong state.
    """

    def __init__(self, path: Path, *, slots: int, state_bytes: int) -> None:
        """Open a file whose slots have room for so many bytes; one of another size becomes a new one."""
        self.slots, self.state_bytes = slots, state_bytes
        size = slots * (SLOT_HEAD + state_bytes)
        with path.open("a+b") as file:
            if os.fstat(file.fileno()).st_size != size:
                file.truncate(0)
                file.truncate(size)
            memory = mmap.mmap(file.fileno(), 0)
        whole = torch.frombuffer(memory, dtype=torch.uint8).view(slots, SLOT_HEAD + state_bytes)
        self._steps = [slot[:8].view(torch.int64) for slot in whole]
        self._states = [slot[SLOT_HEAD:] for slot in whole]
        self._begun: int | None = None

    @classmethod
    def found(cls, path: Path, *, slots: int) -> StateFile:
        """Open a file that has so many slots of any size."""
        return StateFile(path, slots=slots, state_bytes=path.stat().st_size // slots - SLOT_HEAD)

    def steps(self) -> list[int]:
        """Return the steps whose state is kept."""
        return [int(step) - 1 for step in self._steps if step != NO_STEP]

    def begin(self, step: int) -> Tensor:
        """Return the bytes of the slot to write the state after a step to: its own, or the oldest one.

        The slot that was written last is not the oldest, even if training has gone back to an earlier step.
        """
        steps = [int(each) for each in self._steps]
        if step + 1 in steps:
            slot = steps.index(step + 1)
        else:
            others = [index for index in range(len(steps)) if index != self._begun]
            slot = min(others, key=steps.__getitem__)
        self._steps[slot].fill_(NO_STEP)
        self._begun = slot
        return self._states[slot]

    def commit(self, step: int) -> None:
        """Note that the state after a step is complete in the slot that `begin` has returned."""
        assert self._begun is not None
        self._steps[self._begun].fill_(step + 1)

    def state(self, step: int) -> Tensor:
        """Return the bytes of the state after a step. Raises RunError if it is not kept."""
        for number, state in zip(self._steps, self._states, strict=True):
            if number == step + 1:
                return state
        raise RunError(f"the state of the worker after step {step} is not kept")


class KeptState(StateFile):
    """A file with tensors after each of the last steps."""

    def __init__(self, path: Path, like: Sequence[Tensor], *, slots: int) -> None:
        """Open the file for tensors of these shapes and data types, or create it."""
        self._like = [torch.empty_like(each, device="meta") for each in like]
        super().__init__(path, slots=slots, state_bytes=bytes_of(like))

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors have the shapes and data types of the file."""
        mine = [(each.shape, each.dtype) for each in self._like]
        return mine == [(each.shape, each.dtype) for each in tensors]

    @torch.no_grad()
    def write(self, step: int, tensors: Sequence[Tensor]) -> None:
        """Keep the state after a step, in place of the oldest. A kill in between leaves no wrong state."""
        torch._foreach_copy_(self._views(self.begin(step)), list(tensors))
        self.commit(step)

    def read(self, step: int) -> list[Tensor]:
        """Return the state after a step, which further steps overwrite. Raises RunError if it is not kept."""
        return self._views(self.state(step))

    def _views(self, state: Tensor) -> list[Tensor]:
        """Return the tensors whose memory is that of a slot."""
        views, start = [], 0
        for like in self._like:
            part = state[start : start + like.nbytes]
            views.append(part.view(like.dtype).view(like.shape))
            start += padded(like.nbytes)
        return views


def bytes_of(like: Sequence[Tensor]) -> int:
    """Return the bytes of a state with tensors of these shapes and data types."""
    return sum(padded(each.nbytes) for each in like)


def padded(size: int) -> int:
    """Return the bytes from the beginning of a tensor to the next one."""
    return -(-size // ALIGNMENT) * ALIGNMENT
