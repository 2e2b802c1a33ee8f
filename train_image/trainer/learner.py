"""What learns: network, optimiser and all that goes with them, one step and one validation at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trainer.config import TrainerConfig, share_batch
from trainer.data.batch import Batch
from trainer.data.on_device import ToInput, augmented, moved
from trainer.data.parquet import Images
from trainer.model import build_model
from trainer.optimize import Precision, average_of, build_optimizer, learning_rate
from trainer.progress import Length
from trainer.strategy import STRATEGIES, Worker
from trainer.validation import Answers, Tally, Validation

EMPTY_SHARE = 2
"""Images that stand in for a share of none: batch norm wants more than one."""


class Learner:
    """One worker's copy of the model with everything that changes by training."""

    def __init__(
        self, config: TrainerConfig, images: Images, length: Length, worker: Worker
    ) -> None:
        self.train_config = config.train
        self.augment = config.data.augment
        self.images = images
        self.length = length
        self.worker = worker
        self.micro_batch_size = share_batch(config.train, worker.world_size).micro_batch_size
        self.to_input = ToInput(images, config.train.model.image_size, worker.device)
        self.precision = Precision.of(config.train.precision, worker.device)
        self.precision.set_for_process()
        self.layout = torch.channels_last if config.train.channels_last else torch.contiguous_format

        torch.manual_seed(config.train.seed)
        network = build_model(config.train.model)
        self.network = network.to(worker.device, memory_format=self.layout)
        self.average = (
            average_of(self.network, config.train.ema_decay) if config.train.ema_decay else None
        )
        self.optimizer = build_optimizer(self.network, config.train, worker.device)
        self.scaler = torch.amp.GradScaler(worker.device.type, enabled=self.precision.is_scaled)

    def load(self, weights: dict[str, Any], state: dict[str, Any]) -> None:
        """Go on from a checkpoint. Before `start`, since workers compare their weights there."""
        self.network.load_state_dict(weights)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.average:
            self.average.load_state_dict(state["average"])

    def start(self) -> None:
        """Spread the model over the workers."""
        self.strategy = STRATEGIES[self.train_config.strategy]
        self.wrapped = self.strategy.wrap(self.network, self.worker)
        self.model: nn.Module = (
            torch.compile(self.wrapped) if self.train_config.compile else self.wrapped
        )

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs beside the weights."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "average": self.average.state_dict() if self.average else {},
        }

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
        parts = list(self._parts(moved(batch, worker.device)))
        for index, part in enumerate(parts):
            is_last = index == len(parts) - 1
            alone = nullcontext() if is_last else self.strategy.without_exchange(self.wrapped)
            with alone:
                pixels = augmented(part, self.augment, seed=train.seed, epoch=epoch)
                loss = self._loss(pixels, part, tally)
                # Workers' gradients are averaged; what counts is each sample of the global batch once.
                share = worker.world_size * len(part.labels) / global_samples
                self.scaler.scale(loss * share).backward()
        if not parts:
            self._take_part()
        self._move()
        return rate

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        for start in range(0, len(batch.labels), self.micro_batch_size):
            yield Batch(*(column[start : start + self.micro_batch_size] for column in batch))

    def _loss(self, pixels: torch.Tensor, part: Batch, tally: Tally) -> torch.Tensor:
        """Mean loss of a part; its sum goes to the tally."""
        outputs = self._forward(self.model, pixels)
        smoothing = self.train_config.label_smoothing
        loss = functional.cross_entropy(outputs, part.labels, label_smoothing=smoothing)
        tally.add(loss, outputs, part.labels)
        return loss

    def _forward(self, model: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
        """Outputs in float32."""
        inputs = self.to_input(pixels).to(memory_format=self.layout)
        with self.precision.autocast(self.worker.device):
            outputs = model(inputs)
        return outputs.float()

    def _take_part(self) -> None:
        """Help to average the others' gradients, with none of one's own."""
        shape = (EMPTY_SHARE, *self.images.shape)
        pixels = torch.zeros(shape, dtype=torch.uint8, device=self.worker.device)
        loss = self._forward(self.model, pixels).sum()
        self.scaler.scale(loss * 0).backward()

    def _move(self) -> None:
        """Change the weights by their gradients."""
        if self.train_config.clip_norm:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(
                self.network.parameters(), self.train_config.clip_norm, foreach=True
            )
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average:
            self.average.update_parameters(self.network)

    # Validation.

    def validate(self, batches: Iterable[Batch]) -> Validation:
        """What the network says of the validation images of all workers, each counted once."""
        network = self.delivered().eval()
        self.strategy.agree(network, self.worker)
        answers = Answers(len(self.images.classes), self.worker)
        with torch.inference_mode():
            for batch in batches:
                here = moved(batch, self.worker.device)
                answers.add(self._forward(network, here.pixels), here)
        network.train()
        return answers.over_all()

    def is_finite(self) -> bool:
        """Whether all weights are numbers."""
        return bool(
            torch.stack([p.detach().isfinite().all() for p in self.network.parameters()]).all()
        )


def seed_generators(device: torch.device, seed: int, samples: int, rank: int) -> None:
    """Seed the generators that a model draws from (torch.manual_seed would ask every kind of device)."""
    number = ((seed * 1_000_003 + samples) * 65_537 + rank) % 2**63
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed(number)
