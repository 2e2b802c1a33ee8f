"""What learns: network, optimiser and all that goes with them, one step and one validation at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn

from trainyard_trainer.config.batch_share import share_batch
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.loading.batch import Batch, moved
from trainyard_trainer.data.prepared import DatasetInfo
from trainyard_trainer.engine.optimizers import (
    Precision,
    average_of,
    build_optimizer,
    learning_rate,
)
from trainyard_trainer.parallel.strategy import Worker, local, strategy_of
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.recipes.validation import Tally, Validation
from trainyard_trainer.run_folder.progress import Length


class Learner:
    """One worker's copy or share of the model, with everything that changes by training."""

    def __init__(
        self, config: TrainerConfig, images: DatasetInfo, length: Length, worker: Worker
    ) -> None:
        self.train_config = config.train
        self.length = length
        self.worker = worker
        self.micro_batch_size = share_batch(config.train, worker.world_size).micro_batch_size
        self.precision = Precision.of(config.train.precision, worker.device)
        self.precision.set_for_process()
        self.lesson = recipe_of(config.train).lesson(config, images, worker.device)

        torch.manual_seed(config.train.seed)
        self.network = self.lesson.build()
        self.strategy = strategy_of(config.train, self.precision.dtype)
        if not self.strategy.is_sharded:
            self.network.to(worker.device)
        self.average = (
            average_of(self.network, config.train.ema_decay) if config.train.ema_decay else None
        )
        # Spread the model over the workers.
        if self.average and self.strategy.is_sharded:
            self.strategy.wrap(self.average.module, worker)
        wrapped = self.strategy.wrap(self.network, worker)
        optimizer = build_optimizer(
            self.network, config.train, worker.device, is_sharded=self.strategy.is_sharded
        )
        self.wrapped, self.optimizer = self.strategy.tie(wrapped, optimizer, worker)
        self.model: nn.Module = (
            cast(nn.Module, torch.compile(self.wrapped)) if config.train.compile else self.wrapped
        )
        self.scaler = torch.amp.GradScaler(worker.device.type, enabled=self.precision.is_scaled)

    # What is saved: by one worker all, or where weights are shared out, by each its shares.

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs beside the weights and beside shares."""
        if self.strategy.is_sharded:
            return {"scaler": self.scaler.state_dict()}
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": self.average.state_dict() if self.average else {},
        }

    def load(self, weights: dict[str, Any], state: dict[str, Any]) -> None:
        """Go on from what one worker has saved."""
        self.network.load_state_dict(weights)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.average:
            self.average.load_state_dict(state["average"])

    def load_beside_shares(self, state: dict[str, Any]) -> None:
        """Go on from what one worker has saved, where each has saved its share."""
        self.scaler.load_state_dict(state["scaler"])

    def agree(self) -> None:
        """Give all workers the buffers of rank 0."""
        for network in (self.network, self.average):
            if network is not None:
                self.strategy.agree(network, self.worker)

    def delivered(self) -> nn.Module:
        """The network whose weights are validated and delivered."""
        return self.average.module if self.average else self.network

    def exchange_s(self) -> float:
        """Seconds per step that the exchange of gradients made the step longer."""
        return self.strategy.exchange_s(self.wrapped)

    # A step.

    def step(self, batch: Batch, tally: Tally, *, epoch: int, step_in_epoch: int) -> float:
        """Learn from one global batch, of which `batch` is this worker's share; returns the rate."""
        train, worker = self.train_config, self.worker
        global_samples = self.length.batch_size(step_in_epoch)
        samples = self.length.samples_until(epoch, step_in_epoch)
        rate = learning_rate(train, samples, self.length.samples)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # What the model itself draws, such as for dropout, follows from the step alone, too.
        seed_generators(worker.device, train.seed, samples, worker.rank)

        self.optimizer.zero_grad(set_to_none=True)
        parts = list(self._parts(moved(batch, worker.device), global_samples))
        for index, part in enumerate(parts):
            is_last = index == len(parts) - 1
            alone = nullcontext() if is_last else self.strategy.without_exchange(self.wrapped)
            with alone:
                if not len(part.labels):
                    self._take_part()
                    continue
                outputs = self._forward(self.model, self.lesson.inputs(part, epoch=epoch))
                judged = self.lesson.judged(outputs, part)
                tally.add(judged)
                # Workers' gradients are averaged; what counts is each sample of the global batch once.
                share = worker.world_size * len(part.labels) / global_samples
                self._backward(judged.loss * share)
        self._move()
        return rate

    def _parts(self, batch: Batch, global_samples: int) -> Iterator[Batch]:
        """At least one, which may be empty; where all workers take part in each pass, the same number."""
        most = len(batch.labels)
        if self.strategy.is_sharded:
            most = -(-global_samples // self.worker.world_size)
        for start in range(0, max(most, 1), self.micro_batch_size):
            yield Batch(*(column[start : start + self.micro_batch_size] for column in batch))

    def _forward(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs in float32."""
        with self.precision.autocast(self.worker.device):
            outputs = model(inputs)
        return outputs.float()

    def _take_part(self) -> None:
        """Help to average the others' gradients, with none of one's own."""
        loss = self._forward(self.model, self.lesson.no_inputs()).sum()
        self._backward(loss * 0)

    def _backward(self, loss: torch.Tensor) -> None:
        self.strategy.backward(self.wrapped, self.scaler.scale(loss))

    def _move(self) -> None:
        """Change the weights by their gradients."""
        if self.train_config.clip_norm:
            self.scaler.unscale_(self.optimizer)
            self.strategy.clip(self.network, self.train_config.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average:
            self.average.update_parameters(self.network)

    # Validation.

    def validate(self, batches: Iterable[Batch]) -> Validation:
        """What the network says of the validation samples of all workers, each counted once.

        All workers give the same number of batches, of which some may be empty.
        """
        network = self.delivered().eval()
        self.strategy.agree(network, self.worker)
        answers = self.lesson.answers(self.worker)
        # Not inference mode: weights that are gathered in it are of no use for training afterwards.
        with torch.no_grad():
            for batch in batches:
                here = moved(batch, self.worker.device)
                if len(here.labels):
                    answers.add(self._forward(network, self.lesson.inputs(here)), here)
                elif self.strategy.is_sharded:
                    self._forward(network, self.lesson.no_inputs())
        network.train()
        self.strategy.rest(network)
        return answers.over_all()

    def is_finite(self) -> bool:
        """Whether all weights are numbers; all workers ask together."""
        shares = [local(each).detach() for each in self.network.parameters()]
        bad = torch.stack([~share.isfinite().all() for share in shares]).sum()
        return not self.worker.sum(bad)


def seed_generators(device: torch.device, seed: int, samples: int, rank: int) -> None:
    """Seed the generators that a model draws from (torch.manual_seed would ask every kind of device)."""
    number = ((seed * 1_000_003 + samples) * 65_537 + rank) % 2**63
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
