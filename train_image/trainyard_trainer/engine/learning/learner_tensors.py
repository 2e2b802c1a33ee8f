"""The tensors that training changes, for copies in the memory of the nodes."""

from __future__ import annotations

from torch import Tensor

from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.parallel.torch_strategy import local_shard


class LearnerTensors:
    """This worker's tensors of a learner that training changes. Their order is the same each time."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._strategy = learner.strategy

    def own(self) -> list[Tensor]:
        """Return those that this worker alone has.

        Of a sharded model it is the worker's part of all that a checkpoint holds. With DDP it is the buffers
        of rank 0. Raises ConfigError if the state of an optimizer is not a tensor.
        """
        learner = self._learner
        networks = [learner.network, *([learner.average.network] if learner.average else [])]
        buffers = [buffer for each in networks for buffer in each.buffers()]
        if not self._strategy.is_sharded:
            return buffers if learner.worker.rank == 0 else []
        weights = self._weights() if self._strategy.shards_weights else []
        return [*weights, *self._of_optimizers(), *buffers]

    def common(self) -> list[Tensor]:
        """Return those that all workers have alike.

        Optimizers that have made no step yet have none. Raises ConfigError as `own` does.
        """
        weights = [] if self._strategy.shards_weights else self._weights()
        return weights if self._strategy.is_sharded else [*weights, *self._of_optimizers()]

    def _weights(self) -> list[Tensor]:
        """Return this worker's part of the weights and of their average."""
        learner = self._learner
        weights = [
            each
            for each in learner.network.parameters()
            if each.requires_grad or learner.saves_frozen_weights
        ]
        averages = [*learner.average.network.parameters()] if learner.average else []
        return [local_shard(each).detach() for each in (*weights, *averages)]

    def _of_optimizers(self) -> list[Tensor]:
        """Return this worker's part of the state of the optimizers."""
        return [
            local_shard(each).detach()
            for optimizer in self._learner.optimizers
            for each in self._strategy.optimizer_tensors(optimizer)
        ]

    def make_optimizer_state(self) -> None:
        """Make the tensors of optimizers that have made no step yet. Their values are to be loaded."""
        self._strategy.make_optimizer_state(self._learner.network, self._learner.optimizers)
