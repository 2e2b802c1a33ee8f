"""The training loop of one worker. It knows torch and the run's folder, and nothing of Ray."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from trainer import resume
from trainer.checkpoint import MODEL, STATE, Checkpoint, Checkpoints
from trainer.config import Sgd, TrainerConfig
from trainer.data.parquet import Images
from trainer.data.torch_loader import Batch
from trainer.errors import RunError
from trainer.folder import RunFolder
from trainer.model import build_model, to_input
from trainer.progress import Length, Report, Trained, eta_s, per_second
from trainer.strategy import STRATEGIES, Worker

REPORT_INTERVAL_S = 1.0


class Batches(Protocol):
    """Training batches of one worker: `Length.steps_per_epoch` in each epoch, on each worker."""

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch, counted from 0."""


def train(
    config: TrainerConfig,
    *,
    worker: Worker,
    folder: RunFolder,
    images: Images,
    length: Length,
    batches: Batches,
    validation: Iterable[Batch],
    report: Callable[[Report], None],
    attempt: int,
    say: Callable[[str], None] = print,
) -> Checkpoint | None:
    """Train what is left of the run; returns the checkpoint that it started from.

    All workers of the run call it alike; rank 0 alone writes, reports and speaks.
    """
    torch.set_num_threads(config.scaling.cpus_per_worker)
    recipe = config.train
    is_first = worker.rank == 0
    checkpoints = Checkpoints(folder)

    # Where to start: the newest intact checkpoint, else the seed. Rank 0 decides for all.
    start = worker.from_rank_zero(resume.begin(folder, say) if is_first else None)
    torch.manual_seed(recipe.seed)
    network = build_model(recipe.model)
    if start:
        network.load_state_dict(checkpoints.load(start.name, MODEL))
    strategy = STRATEGIES[recipe.strategy]
    model = strategy.wrap(network, worker)
    optimizer = build_optimizer(model, config)
    if start:
        optimizer.load_state_dict(checkpoints.load(start.name, STATE)["optimizer"])
    at_start = trained = start.trained if start else Trained()
    began = Clock()

    for epoch in range(at_start.epoch, recipe.epochs):
        # Seeded per epoch: a resumed run then draws the same numbers as one that never stopped.
        torch.manual_seed(((recipe.seed * 1_000_003 + epoch) * 65_537 + worker.rank) % 2**63)
        step, samples, rate = trained.step, trained.samples, 0.0
        tally, steps_clock = Tally(worker.device), Clock()
        interval_clock, interval_start = Clock(), step
        last_step = step + length.steps_per_epoch

        # Train.
        model.train()
        for pixels, labels in batches.epoch(epoch):
            rate = cosine(recipe.optimizer.learning_rate, samples, length.samples)
            for group in optimizer.param_groups:
                group["lr"] = rate
            pixels = pixels.to(worker.device, non_blocking=True)
            labels = labels.to(worker.device, non_blocking=True)
            outputs = model(to_input(pixels, images, recipe.model.image_size))
            loss = functional.cross_entropy(outputs, labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            tally.add(loss, outputs, labels)
            step += 1
            samples += length.global_batch_size

            if is_first and step < last_step and interval_clock.seconds() >= REPORT_INTERVAL_S:
                interval_loss, accuracy = tally.since_last()
                stop_if_not_finite(interval_loss, interval_start + 1, step)
                interval_samples = (step - interval_start) * length.global_batch_size
                report(
                    Report(
                        kind="interval",
                        epoch=epoch + 1,
                        step=step,
                        samples=samples,
                        loss=interval_loss,
                        accuracy=accuracy,
                        learning_rate=rate,
                        images_per_s=per_second(interval_samples, interval_clock.seconds()),
                        eta_s=eta_s(length.samples, samples, at_start.samples, began.seconds()),
                        val_loss=trained.val_loss,
                        val_accuracy=trained.val_accuracy,
                    )
                )
                interval_clock, interval_start = Clock(), step
        epoch_loss, accuracy = tally.over_all(worker)
        stop_if_not_finite(epoch_loss, trained.step + 1, step)
        step_s = steps_clock.seconds()

        # Validate: each worker its part, all with the same buffers.
        strategy.agree(model, worker)
        val_loss, val_accuracy = validate(
            network, validation, images, recipe.model.image_size, worker
        )

        # Report, then save: a checkpoint whose metrics are missing could not be explained.
        epoch_samples = samples - trained.samples
        trained = Trained(
            epoch=epoch + 1,
            step=step,
            samples=samples,
            train_s=at_start.train_s + began.seconds(),
            step_s=trained.step_s + step_s,
            loss=epoch_loss,
            accuracy=accuracy,
            val_loss=val_loss,
            val_accuracy=val_accuracy,
        )
        if not is_first:
            continue
        report(
            Report(
                kind="epoch",
                epoch=trained.epoch,
                step=step,
                samples=samples,
                loss=epoch_loss,
                accuracy=accuracy,
                learning_rate=rate,
                images_per_s=per_second(epoch_samples, step_s),
                eta_s=eta_s(length.samples, samples, at_start.samples, began.seconds()),
                val_loss=val_loss,
                val_accuracy=val_accuracy,
            )
        )
        if trained.epoch % config.checkpoint.every_epochs == 0 or trained.epoch == recipe.epochs:
            checkpoints.save(
                trained,
                attempt=attempt,
                keep=config.checkpoint.keep,
                model=strategy.state(model),
                state={"optimizer": optimizer.state_dict()},
                config=config.model_dump(mode="json"),
            )
    return start


def validate(
    network: nn.Module,
    batches: Iterable[Batch],
    images: Images,
    image_size: int,
    worker: Worker,
) -> tuple[float, float]:
    """Loss and accuracy over the validation images of all workers, each counted once."""
    network.eval()
    tally = Tally(worker.device)
    with torch.inference_mode():
        for pixels, labels in batches:
            pixels = pixels.to(worker.device, non_blocking=True)
            labels = labels.to(worker.device, non_blocking=True)
            outputs = network(to_input(pixels, images, image_size))
            tally.add(functional.cross_entropy(outputs, labels), outputs, labels)
    return tally.over_all(worker)


class Tally:
    """Loss and hits, summed on the device: reading them makes the host wait, so it is done rarely."""

    def __init__(self, device: torch.device) -> None:
        # Loss times samples, hits, samples. In float64, which counts samples without rounding.
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.last = (0.0, 0.0)

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """`loss` is the mean of the batch."""
        with torch.no_grad():
            hits = (outputs.argmax(dim=1) == labels).sum()
            self.sums += torch.stack(
                [loss.double() * len(labels), hits, hits.new_tensor(len(labels))]
            )

    def since_last(self) -> tuple[float, float]:
        """Mean loss since the last call, and accuracy since the start."""
        loss, hits, count = self.sums.tolist()
        loss_before, count_before = self.last
        self.last = (loss, count)
        return (loss - loss_before) / (count - count_before), hits / count

    def over_all(self, worker: Worker) -> tuple[float, float]:
        """Mean loss and accuracy over all workers. Ends this worker's own count."""
        loss, hits, count = worker.sum(self.sums).tolist()
        return loss / count, hits / count


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self.start


def build_optimizer(model: nn.Module, config: TrainerConfig) -> torch.optim.Optimizer:
    wanted = config.train.optimizer
    if isinstance(wanted, Sgd):
        return torch.optim.SGD(
            model.parameters(),
            lr=wanted.learning_rate,
            momentum=wanted.momentum,
            weight_decay=wanted.weight_decay,
        )
    return torch.optim.AdamW(
        model.parameters(), lr=wanted.learning_rate, weight_decay=wanted.weight_decay
    )


def cosine(learning_rate: float, samples: int, total: int) -> float:
    """The learning rate after so many samples: down to zero over the run, slowly at both ends."""
    return learning_rate * 0.5 * (1 + math.cos(math.pi * min(samples / total, 1.0)))


def stop_if_not_finite(loss: float, first_step: int, last_step: int) -> None:
    if not math.isfinite(loss):
        raise RunError(
            f"the loss became {loss} in steps {first_step} to {last_step}. "
            "Lower train.optimizer.learning_rate."
        )
