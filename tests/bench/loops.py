"""Two loops in this process that train the same model: the trainer's, and a plain PyTorch loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.prepared import DatasetInfo, Prepared, Split
from trainyard_trainer.engine import loop
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.engine.learning.optimizers import build_optimizer
from trainyard_trainer.engine.regrouping import GroupStart
from trainyard_trainer.engine.run_records import NoRecords, RunRecords
from trainyard_trainer.engine.step_sync import Signals
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.run_folder.measurements.progress import Length, Trained
from trainyard_trainer.run_folder.measurements.startup import Startup

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What both loops have in common."""

    config: TrainerConfig
    images: DatasetInfo
    worker: Worker
    steps: int
    """That are counted."""
    skip: int
    """Steps before them."""
    clock: Clock
    build: Callable[[Any], nn.Module] | None = None
    """Builds the network in place of the recipe. Each loop gets a network of its own."""

    @property
    def data(self) -> Prepared:
        """A data set of these samples without files: batches are made in memory."""
        nothing = Split(files=(), rows=())
        return Prepared(info=self.images, train=nothing, valid=nothing, path="", endpoint=None)

    @property
    def length(self) -> Length:
        size = self.config.train.global_batch_size
        samples = (self.skip + self.steps) * size
        return Length(epochs=1, num_samples=samples, global_batch_size=size, drop_last=True)


class Counted:
    """Batches that tell how fast they were learnt from: a step is over when the next batch is asked for."""

    def __init__(self, batches: Iterable[Batch], settings: Settings) -> None:
        self.batches = batches
        self.settings = settings
        self.samples_per_s = 0.0
        self.step_s = 0.0

    def epoch(self, epoch: int) -> Iterator[Batch]:
        settings = self.settings
        for index, batch in enumerate(self.batches):
            if index == settings.skip:
                began = settings.clock()
            yield batch
        seconds = settings.clock() - began
        self.step_s = seconds / settings.steps
        self.samples_per_s = settings.steps * settings.config.train.global_batch_size / seconds

    def state(self) -> dict[str, torch.Tensor]:
        return {}


def ours(settings: Settings) -> Callable[[Iterable[Batch]], Counted]:
    """The trainer's loop, with a model that learns on from call to call."""
    config = settings.config
    learner = Learner(config, settings.data, settings.length, settings.worker)
    if settings.build:
        learner.network = module = settings.build(config.train.model)
        optimizer = build_optimizer(module.parameters(), config.train, settings.worker.device)
        changed = {"module": module, "wrapped": module, "model": module, "optimizer": optimizer}
        learner.trained = [replace(learner.trained[0], **changed)]

    def learn(batches: Iterable[Batch], records: RunRecords | None = None) -> Counted:
        counted = Counted(batches, settings)
        loop.TrainingLoop(
            config,
            learner,
            start=loop.LoopStart(
                trained=Trained(),
                group=GroupStart(resumed_from=None, startup=Startup(began=time.time())),
                attempt_began=time.time(),
                nodes=("here",),
            ),
            batches=counted,
            validation=[same_batch(settings, size=2)],
            records=records or NoRecords(),
            signals=Signals(),
        ).run()
        return counted

    return learn


class ByHand:
    """A plain PyTorch step with the same settings, and nothing that is not needed to learn."""

    def __init__(
        self,
        config: TrainerConfig,
        images: DatasetInfo,
        worker: Worker,
        *,
        steps: int,
        build: Callable[[Any], nn.Module] | None = None,
    ) -> None:
        train, device = config.train, worker.device
        self.device = device
        self.is_text = images.kind == "text"
        is_channels_last = getattr(train, "channels_last", False)
        self.layout = torch.channels_last if is_channels_last else torch.contiguous_format
        self.is_bf16 = train.precision == "bf16"
        is_tf32 = train.precision != "fp32"
        torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = is_tf32
        torch.manual_seed(train.seed)
        model = build(train.model) if build else recipe_of(config, images).build_model()
        self.model = model.to(device, memory_format=self.layout)
        self.optimizer = build_optimizer(self.model.parameters(), train, device)
        if worker.world_size > 1:
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        if train.compile:
            self.model = torch.compile(self.model)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)
        if not self.is_text:
            self.mean = torch.tensor(images.mean, device=device).view(1, -1, 1, 1)
            self.std = torch.tensor(images.std, device=device).view(1, -1, 1, 1)

    def step(self, batch: Batch) -> None:
        batch = batch.to(self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.is_bf16):
            loss = self.text_loss(batch["text"]) if self.is_text else self.image_loss(batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()

    def image_loss(self, batch: Batch) -> torch.Tensor:
        pixels = batch["image"].float() / 255
        inputs = ((pixels - self.mean) / self.std).to(memory_format=self.layout)
        return functional.cross_entropy(self.model(inputs), batch["label"])

    def text_loss(self, text: torch.Tensor) -> torch.Tensor:
        rows = text.long()
        outputs = self.model(rows[:, :-1])
        return functional.cross_entropy(outputs.flatten(0, 1), rows[:, 1:].flatten())


def by_hand(settings: Settings) -> Callable[[Iterable[Batch]], Counted]:
    """A loop of plain steps, with a model that learns on from call to call."""
    loop = ByHand(
        settings.config,
        settings.images,
        settings.worker,
        steps=settings.length.steps,
        build=settings.build,
    )

    def learn(batches: Iterable[Batch]) -> Counted:
        counted = Counted(batches, settings)
        for batch in counted.epoch(0):
            loop.step(batch)
        return counted

    return learn


def same_batch(settings: Settings, size: int | None = None) -> Batch:
    """Return random pixels or bytes, and labels, where a loader would leave them: pinned for a GPU."""
    random = torch.Generator().manual_seed(0)
    size = size or settings.config.train.global_batch_size
    columns = {
        name: torch.randint(0, 256, (size, *column.shape), dtype=torch.uint8, generator=random)
        for name, column in settings.images.columns.items()
        if column.shape
    }
    if settings.images.classes:
        columns["label"] = torch.randint(0, len(settings.images.classes), (size,), generator=random)
    batch = Batch(columns, torch.arange(size))
    return batch.pin_memory() if settings.worker.device.type == "cuda" else batch


def again_and_again(batch: Batch, settings: Settings) -> Iterator[Batch]:
    """As many batches as are learnt from, all alike: no time goes into data."""
    for _ in range(settings.skip + settings.steps):
        yield batch
