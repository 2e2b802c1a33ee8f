"""What a worker with DDP alone has after each step, kept so that a replacement can go on with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from trainyard_trainer.engine.learning.buffer_blocks import BufferBlocks
from trainyard_trainer.engine.learning.optimizers import WeightAverage
from trainyard_trainer.engine.learning.sums import LossSums
from trainyard_trainer.engine.own_state import OwnState
from trainyard_trainer.kept_files import KeptFiles
from trainyard_trainer.parallel.worker import Worker


class KeptForLoss:
    """The loss sums of a worker and, of rank 0, the buffers: DDP sends them to the others before each pass.

    They are in files that outlive the worker.
    """

    def __init__(
        self,
        files: KeptFiles,
        worker: Worker,
        network: nn.Module,
        average: WeightAverage | None,
        sums: LossSums,
        timeout_s: float,
    ) -> None:
        """Open the files of this worker, or create them. `sums` are empty.

        Another worker may be at a step for `timeout_s` seconds.
        """
        self._network, self._average = network, average
        self._buffers: list[BufferBlocks] = []
        if worker.rank == 0:
            averages = [average.network] if average else []
            self._buffers = [BufferBlocks(each) for each in (network, *averages)]
        self._state = OwnState(files, worker, self._tensors(sums), timeout_s)

    def share(self, nodes: Sequence[str]) -> None:
        """Keep the state of each worker on another node as well.

        `nodes` has the node of each rank. All workers must call it when they have joined a process group.
        """
        self._state.join_group(nodes)

    def fetch(self, step: int, replaced: Collection[int]) -> None:
        """Bring what lost workers alone had after a step to their replacements. All workers must call it.

        Raises RunError if it was lost with the node of one.
        """
        self._state.fetch(step, replaced)

    def write(self, step: int, sums: LossSums) -> None:
        """Keep the state after a step. All workers must call it.

        The step may still lack the exchange of its gradients, the optimizer's update and that of the average.
        """
        self._state.write(step, self._tensors(sums))

    def restore(self, step: int, sums: LossSums) -> None:
        """Restore what the worker of this rank alone had after a step; `sums` gets the loss sums.

        The weights are those after the step already. Raises RunError if the state is not kept.
        """
        own = self._tensors(sums)
        torch._foreach_copy_(own, self._state.read(step))
        if self._buffers and self._average and self._average.updates > int(own[0]):
            self._average.repeat_for_buffers(self._network)

    def _tensors(self, sums: LossSums) -> list[Tensor]:
        updates = torch.tensor(self._average.updates if self._average else 0)
        buffers = [tensor for each in self._buffers for tensor in each.tensors()]
        return [updates, sums.sums, *buffers]
