"""What a worker alone has after its newest steps, in a file that outlives the worker's process.

All workers with DDP have the same weights, but each has loss sums of its own, and only rank 0 has the
buffers that count. The worker that takes the place of a lost one continues with these, so that weights and
metrics are those of a run without the loss.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from trainyard_trainer.errors import RunError

SLOTS = 4
"""The number of steps whose state is kept. Workers are never more than two steps apart."""

NO_STEP = -1

ALIGNMENT = 16
"""Each tensor begins at a multiple of this number of bytes: the size of the largest data type."""


class KeptState:
    """A file in the memory of the machine with the state after each of the last SLOTS steps.

    A worker writes the state after a step before it takes part in the exchange of that step's gradients. So
    the state after a step that any worker has completed is known of all workers.
    """

    def __init__(self, path: Path, like: Sequence[Tensor], *, is_new: bool) -> None:
        """Open the file for tensors of these shapes and data types, or create it."""
        sizes = [padded(each.numel() * each.element_size()) for each in like]
        slot_size = ALIGNMENT + sum(sizes)
        if is_new:
            path.write_bytes(bytes(SLOTS * slot_size))
        try:
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 0)
        except FileNotFoundError as error:
            raise RunError(f"the file {path} with the state of the lost worker is gone") from error
        if len(self._memory) != SLOTS * slot_size:
            raise RunError(f"the file {path} does not have the state of a worker of this run")
        self._steps: list[Tensor] = []
        self._slots: list[list[Tensor]] = []
        for start in range(0, SLOTS * slot_size, slot_size):
            self._steps.append(self._view(torch.zeros((), dtype=torch.int64), start))
            offsets = [start + ALIGNMENT + sum(sizes[:index]) for index in range(len(sizes))]
            self._slots.append(
                [self._view(each, offset) for each, offset in zip(like, offsets, strict=True)]
            )
        if is_new:
            for step in self._steps:
                step.fill_(NO_STEP)

    def _view(self, like: Tensor, offset: int) -> Tensor:
        """Return a tensor of this shape and data type whose memory is that of the file."""
        if not like.numel():
            return torch.empty_like(like, device="cpu")
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=offset)
        return flat.view(like.shape)

    @torch.no_grad()
    def write(self, step: int, tensors: Sequence[Tensor]) -> None:
        """Keep the state after a step, in place of the oldest. A kill in between leaves no wrong state."""
        slot = step % SLOTS
        self._steps[slot].fill_(NO_STEP)
        torch._foreach_copy_(self._slots[slot], list(tensors))
        self._steps[slot].fill_(step)

    def read(self, step: int) -> list[Tensor]:
        """Return the state after a step, which further steps overwrite. Raises RunError if it is not kept."""
        slot = step % SLOTS
        if self._steps[slot] != step:
            raise RunError(f"the state of the lost worker after step {step} is not kept")
        return self._slots[slot]


def padded(size: int) -> int:
    """Return the bytes from the beginning of a tensor to the next one."""
    return -(-size // ALIGNMENT) * ALIGNMENT
