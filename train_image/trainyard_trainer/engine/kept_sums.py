"""The loss sums of a worker after its newest steps, in a file that outlives the worker's process.

The worker that takes the place of a lost one continues with its sums, so that the metrics of the epoch are
those of a run without the loss.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import torch

from trainyard_trainer.errors import RunError

SLOTS = 4
"""The number of steps whose sums are kept. Workers are never more than two steps apart."""

NO_STEP = -1


class KeptSums:
    """A file in shared memory with the sums after each of the last SLOTS steps.

    A worker writes the sums of a step before it takes part in the exchange of that step's gradients. So the
    sums of a step that any worker has completed are known of all workers.
    """

    def __init__(self, path: Path, size: int, *, is_new: bool) -> None:
        """Open the file for sums of `size` numbers, or create it."""
        if is_new:
            empty = np.zeros((SLOTS, 1 + size))
            empty[:, 0] = NO_STEP
            path.write_bytes(empty.tobytes())
        try:
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 0)
        except FileNotFoundError as error:
            raise RunError(
                f"the file {path} with the loss sums of the lost worker is gone"
            ) from error
        table = np.frombuffer(self._memory, dtype=np.float64).reshape(SLOTS, 1 + size)
        self._steps, self._sums = table[:, 0], table[:, 1:]

    def write(self, step: int, sums: torch.Tensor) -> None:
        """Keep the sums after a step, in place of the oldest ones. A kill in between leaves no wrong sums."""
        slot = step % SLOTS
        self._steps[slot] = NO_STEP
        self._sums[slot] = sums.numpy()
        self._steps[slot] = step

    def read(self, step: int) -> torch.Tensor:
        """Return the sums after a step. Raises RunError if they are not kept."""
        slot = step % SLOTS
        if self._steps[slot] != step:
            raise RunError(f"the loss sums of the lost worker after step {step} are not kept")
        return torch.from_numpy(self._sums[slot].copy())
