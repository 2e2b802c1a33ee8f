"""Measure training on a GPU beside plain PyTorch: speed, MFU, FSDP2, fused optimizers and checkpoints.

    python -m tests.bench.gpu [--device cpu] [--quick] [--only SECTION ...]

`make gpu` runs it, together with the CUDA tests, and writes docs/results/gpu.json and gpu.md. It needs torch
and the packages of `make gpu-wheels`, but neither Ray nor the launcher. `--device cpu` runs the same code
where there is no GPU.

Synthetic data show the loop alone: one batch in pinned memory, moved to the device at each step. Images from
JPEG files show the loop together with the torch loader.
"""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode
from torchvision.io import ImageReadMode, decode_image, read_file

from tests.bench import data, runs
from tests.bench.loops import Settings, again_and_again, by_hand, ours, same_batch
from tests.bench.rounds import BUILD, Options, Row, Section, alternate, main, ratios, say
from tests.gpu import user_recipe
from trainyard_trainer.checkpointing.checkpoint import MODEL, STATE, Checkpoints
from trainyard_trainer.checkpointing.saver import Saver
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.models import Gpt, Model
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.torch_loader import TorchBatches
from trainyard_trainer.data.prepared import DatasetInfo
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.engine.learning.optimizers import build_optimizer
from trainyard_trainer.hardware import peak_flops
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.image_classification.model import build_model
from trainyard_trainer.recipes.language_model.recipe import flops_per_token
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import Length, Trained

LEAST_RATIO = 0.98
"""The trainer's speed, as a share of the plain loop's, that is asked for."""

GB = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is computed."""

    models: tuple[str, ...]
    image_size: int
    batch_size: int
    num_files: int
    """JPEG files."""
    gpt: Gpt
    gpt_batch_size: int
    steps: int
    """Steps that are timed."""
    skip: int
    """Steps before them."""
    optimizer_steps: int
    is_compiled: bool
    """Whether torch.compile is used; on a CPU it takes a C++ compiler and half a minute."""


FULL = Size(
    models=("resnet18", "resnet50"),
    image_size=224,
    batch_size=256,
    num_files=5_000,
    gpt=Gpt(layers=12, heads=12, width=768, context_length=1024),
    gpt_batch_size=32,
    steps=40,
    skip=10,
    optimizer_steps=100,
    is_compiled=True,
)
SMALL = Size(
    models=("shufflenet_v2_x0_5",),
    image_size=32,
    batch_size=16,
    num_files=200,
    gpt=Gpt(layers=2, heads=2, width=32, context_length=32),
    gpt_batch_size=4,
    steps=3,
    skip=1,
    optimizer_steps=2,
    is_compiled=False,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """The device that is measured, and how thoroughly."""

    device: torch.device
    device_name: str
    size: Size
    rounds: int

    @classmethod
    def of(cls, device: str, options: Options) -> Bench:
        is_cuda = device == "cuda"
        return cls(
            device=torch.device(device, 0) if is_cuda else torch.device(device),
            device_name=torch.cuda.get_device_name() if is_cuda else "CPU",
            size=options.choose(FULL, SMALL),
            rounds=options.rounds_or(3),
        )

    @property
    def precision(self) -> str:
        # A CPU without instructions for bf16 computes it many times slower than fp32.
        return "bf16" if self.device.type == "cuda" else "fp32"

    @property
    def compiling(self) -> str:
        return "torch.compile" if self.size.is_compiled else "not compiled"

    @property
    def peak(self) -> float | None:
        """Peak FLOP/s in bf16; None if the device is not in the table."""
        return peak_flops(self.device)

    @property
    def peak_note(self) -> tuple[str, ...]:
        if self.peak:
            return (f"MFU is the share of {self.peak / 1e12:g} TFLOP/s, the peak in dense bf16.",)
        return (f"MFU is not known: PEAK_FLOPS has no peak for the device {self.device_name!r}.",)

    def clock(self) -> float:
        """Return the time in seconds, after the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def config(
        self, name: str, train: dict[str, Any], source: Path | Mapping[str, Any]
    ) -> TrainerConfig:
        """A run of one worker; `train` overrides the settings that all sections share."""
        size = self.size
        shared = {"precision": self.precision, "compile": size.is_compiled, "epochs": 1}
        return runs.config(
            name,
            source,
            data__decode_workers=decode_workers(),
            train=shared | train,
            scaling__num_workers=1,
            scaling__use_gpu=self.device.type == "cuda",
            scaling__cpus_per_worker=decode_workers(),
        )

    def image_config(self, model: str, source: Path = Path("/made"), **train: Any) -> TrainerConfig:
        network = {
            "name": model,
            "in_channels": 3,
            "num_classes": data.CLASSES,
            "image_size": self.size.image_size,
        }
        settings = {
            "model": network,
            "global_batch_size": self.size.batch_size,
            "channels_last": True,
        }
        return self.config("gpu-images", settings | train, source)

    def text_config(self, **train: Any) -> TrainerConfig:
        settings = {
            "recipe": "language_model",
            "model": self.size.gpt.model_dump(),
            "global_batch_size": self.size.gpt_batch_size,
        }
        return self.config("gpu-language-model", settings | train, Path("/made"))

    def own_config(self) -> TrainerConfig:
        """The same language model, as a recipe of a user."""
        settings = {
            "recipe": user_recipe.RECIPE,
            "model": self.size.gpt.model_dump(),
            "global_batch_size": self.size.gpt_batch_size,
        }
        return self.config("gpu-own-recipe", settings, {"dataset": user_recipe.DATASET})

    def settings(self, config: TrainerConfig, images: DatasetInfo | None = None) -> Settings:
        is_images = config.train.recipe == "image_classification"
        made = made_images(self.size) if is_images else made_text(self.size)
        return Settings(
            config=config,
            images=images or made,
            worker=Worker(device=self.device),
            steps=self.size.steps,
            skip=self.size.skip,
            clock=self.clock,
        )

    def clear(self) -> None:
        """Free the device's memory and the compiled models between two sections or models."""
        torch.compiler.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def made_images(size: Size) -> DatasetInfo:
    """Describe images that are made in memory."""
    return DatasetInfo(
        source="made",
        shape=(3, size.image_size, size.image_size),
        classes=tuple(map(str, range(data.CLASSES))),
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
    )


def made_text(size: Size) -> DatasetInfo:
    """Describe rows of text that are made in memory."""
    shape = (1, 1, size.gpt.context_length + 1)
    return DatasetInfo(source="made", kind="text", shape=shape, classes=(), mean=(), std=())


def decode_workers() -> int:
    """Processes that decode images: as many as there are CPUs beside the loop's own."""
    return max(len(os.sched_getaffinity(0)) - 1, 1)


# Speed on synthetic data.


def images(bench: Bench) -> Section:
    """ResNets in bf16, channels_last and compiled: the trainer's loop beside a plain one."""
    rows: list[Row] = []
    for model in bench.size.models:
        config = bench.image_config(model)
        settings = bench.settings(config)
        batch = same_batch(settings)
        speeds = compare(settings, bench, *[partial(again_and_again, batch, settings)] * 2)
        rows += speed_rows(model, "images/s", speeds)
        assert isinstance(config.train.model, Model)
        rows += mfu_rows(model, speeds, flops_per_image(config.train.model), bench)
        bench.clear()
    size = bench.size
    notes = (
        f"Images of {size.image_size}x{size.image_size}, batch of {size.batch_size}, "
        f"{bench.precision}, channels_last, {bench.compiling}, fused SGD. Both loops "
        "move uint8 pixels from pinned memory and normalize them on the device.",
        *bench.peak_note,
    )
    return Section(
        title="Images: trainyard beside a plain PyTorch loop", rows=tuple(rows), notes=notes
    )


def language_model(bench: Bench) -> Section:
    """The language model: the trainer's loop beside a plain one."""
    speeds = text_speeds(bench, bench.text_config())
    gpt = bench.size.gpt
    rows = [
        *speed_rows("language model", "tokens/s", speeds),
        *mfu_rows("language model", speeds, flops_per_token(gpt), bench),
    ]
    notes = (
        f"{gpt.layers} layers of width {gpt.width} over {gpt.context_length} bytes, batch of "
        f"{bench.size.gpt_batch_size}, {bench.precision}, {bench.compiling}, fused AdamW. A token is a byte.",
        *bench.peak_note,
    )
    return Section(
        title="Language model: trainyard beside a plain PyTorch loop", rows=tuple(rows), notes=notes
    )


def own_recipe(bench: Bench) -> Section:
    """The language model as a recipe of a user: the trainer's loop beside a plain one."""
    speeds = text_speeds(bench, bench.own_config())
    return Section(
        title="A user's recipe beside a plain PyTorch loop",
        rows=tuple(speed_rows("user's recipe", "tokens/s", speeds)),
        notes=("The language model above, as a recipe of a user (tests/gpu/user_recipe.py).",),
    )


def text_speeds(bench: Bench, config: TrainerConfig) -> dict[str, tuple[float, ...]]:
    """Return the tokens per second of both loops on one batch of text."""
    settings = bench.settings(config)
    batch = same_batch(settings)
    speeds = compare(settings, bench, *[partial(again_and_again, batch, settings)] * 2)
    bench.clear()
    return in_tokens(speeds, bench)


def compare(
    settings: Settings,
    bench: Bench,
    our_batches: Callable[[], Iterable[Batch]],
    plain_batches: Callable[[], Iterable[Batch]],
) -> dict[str, tuple[float, ...]]:
    """Return the samples per second of both loops, a value per round. The first round warms up."""
    our_loop, plain_loop = ours(settings), by_hand(settings)
    speeds = alternate(
        {
            "trainyard": lambda: our_loop(our_batches()).samples_per_s,
            "plain": lambda: plain_loop(plain_batches()).samples_per_s,
        },
        bench.rounds + 1,
    )
    say(f"  {settings.config.name}, {settings.config.train.recipe}: {speeds}")
    return {name: values[1:] for name, values in speeds.items()}


def in_tokens(speeds: dict[str, tuple[float, ...]], bench: Bench) -> dict[str, tuple[float, ...]]:
    """Return rows per second as tokens per second."""
    tokens = bench.size.gpt.context_length
    return {name: tuple(tokens * each for each in values) for name, values in speeds.items()}


def speed_rows(title: str, unit: str, speeds: dict[str, tuple[float, ...]]) -> list[Row]:
    return [
        Row(
            what=f"{title}: trainyard over the plain loop",
            unit="x",
            values=ratios(speeds["trainyard"], speeds["plain"]),
            at_least=LEAST_RATIO,
        ),
        *(
            Row(what=f"{title}: {name}", unit=unit, values=values)
            for name, values in speeds.items()
        ),
    ]


def mfu_rows(
    title: str, speeds: dict[str, tuple[float, ...]], flops: float, bench: Bench
) -> list[Row]:
    """Return the MFU of both loops; nothing where the device's peak is not known."""
    if bench.peak is None:
        return []
    return [
        Row(
            what=f"{title}: MFU of {name}",
            unit="%",
            values=tuple(100 * each * flops / bench.peak for each in values),
        )
        for name, values in speeds.items()
    ]


def flops_per_image(model: Model) -> float:
    """Return the floating-point operations of one forward and backward pass of one image."""
    with torch.device("meta"):
        network = build_model(model).train()
        images = torch.empty(2, model.in_channels, model.image_size, model.image_size)
        with FlopCounterMode(display=False) as counter:
            network(images).sum().backward()
    return counter.get_total_flops() / 2


# FSDP2.


def fsdp2(bench: Bench) -> Section:
    """The language model with `strategy: fsdp2` beside `ddp`, both with one worker."""
    speeds, peaks = {}, {}
    loops = {}
    for strategy in ("fsdp2", "ddp"):
        settings = bench.settings(bench.text_config(strategy=strategy, compile=False))
        loops[strategy] = (ours(settings), settings, same_batch(settings))

    def samples_per_s(strategy: str) -> float:
        learn, settings, batch = loops[strategy]
        return learn(again_and_again(batch, settings)).samples_per_s

    speeds = alternate(
        {strategy: partial(samples_per_s, strategy) for strategy in loops}, bench.rounds + 1
    )
    speeds = in_tokens({name: values[1:] for name, values in speeds.items()}, bench)
    say(f"  fsdp2: {speeds}")
    loops.clear()
    bench.clear()
    peaks = {strategy: peak_gb(bench, strategy) for strategy in ("fsdp2", "ddp")}
    rows = [
        Row(
            what="tokens/s of fsdp2 over ddp",
            unit="x",
            values=ratios(speeds["fsdp2"], speeds["ddp"]),
        ),
        *(Row(what=name, unit="tokens/s", values=values) for name, values in speeds.items()),
        *(
            Row(what=f"{name}: peak memory on the GPU", unit="GB", values=(peak,))
            for name, peak in peaks.items()
            if peak is not None
        ),
    ]
    return Section(
        title="FSDP2 on one GPU",
        rows=tuple(rows),
        notes=(
            "The language model above, not compiled. With one worker there is nothing to exchange: the "
            "ratio is what FSDP2 itself costs.",
        ),
    )


def peak_gb(bench: Bench, strategy: str) -> float | None:
    """Return the peak of the memory that training with this strategy allocates; None without a GPU."""
    if bench.device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(bench.device)
    settings = bench.settings(bench.text_config(strategy=strategy, compile=False))
    ours(settings)(again_and_again(same_batch(settings), settings))
    peak = torch.cuda.max_memory_allocated(bench.device) / GB
    bench.clear()
    return peak


# Fused optimizers.


def optimizers(bench: Bench) -> Section:
    """One optimizer step as the trainer makes it, fused, beside PyTorch's default, which is not."""
    rows: list[Row] = []
    configs = {
        f"SGD, {bench.size.models[-1]}": bench.image_config(bench.size.models[-1]),
        "AdamW, language model": bench.text_config(),
    }
    for title, config in configs.items():
        ways = {
            "fused": partial(optimizer_ms, bench, with_gradients(bench, config)),
            "foreach": partial(optimizer_ms, bench, with_gradients(bench, config, fused=False)),
        }
        times = alternate(ways, bench.rounds + 1)
        times = {name: values[1:] for name, values in times.items()}
        say(f"  {title}: {times}")
        rows += [
            Row(
                what=f"{title}: time of foreach over fused",
                unit="x",
                values=ratios(times["foreach"], times["fused"]),
            ),
            *(
                Row(what=f"{title}: {name}", unit="ms/step", values=values)
                for name, values in times.items()
            ),
        ]
        del ways
        bench.clear()
    return Section(
        title="Fused optimizers",
        rows=tuple(rows),
        notes=(
            "The trainer uses the fused optimizers; `foreach` is what PyTorch uses on CUDA where nobody "
            "asks for anything. Only the optimizer's step is timed.",
        ),
    )


def with_gradients(
    bench: Bench, config: TrainerConfig, *, fused: bool = True
) -> torch.optim.Optimizer:
    """Build the trainer's optimizer on a network that has gradients already."""
    network = recipe_of(config).build_model().to(bench.device)
    for weight in network.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer = build_optimizer(network.parameters(), config.train, bench.device)
    for group in optimizer.param_groups:
        assert group["fused"]
        if not fused:
            group |= {"fused": False, "foreach": True}
    return optimizer


def optimizer_ms(bench: Bench, optimizer: torch.optim.Optimizer) -> float:
    began = bench.clock()
    for _ in range(bench.size.optimizer_steps):
        optimizer.step()
    return 1e3 * (bench.clock() - began) / bench.size.optimizer_steps


# Checkpoints.


def checkpoints(bench: Bench) -> Section:
    """How long training stands still for a checkpoint, beside torch.save in the training thread."""
    config = bench.text_config(compile=False)
    settings = bench.settings(config)
    learner = Learner(config, settings.data, settings.length, settings.worker)
    fill_optimizer(learner)
    folder = RunFolder.open(str(BUILD / "runs"), config.name)
    shutil.rmtree(folder.root, ignore_errors=True)
    storage = Checkpoints(folder)
    size_gb = (
        sum(each.numel() * each.element_size() for each in tensors_in(contents_of(learner))) / GB
    )
    num_saved = count(1)

    def save(content: dict[str, Any]) -> None:
        trained = Trained(samples=next(num_saved))
        storage.save(trained, attempt=1, group=1, contents=content["contents"], facts={})

    def plain_ms() -> float:
        Path(folder.root).mkdir(parents=True, exist_ok=True)
        began = bench.clock()
        torch.save(contents_of(learner), f"{folder.root}/plain.pt")
        return 1e3 * (time.perf_counter() - began) / size_gb

    with Saver(save) as saver:

        def stall_ms() -> float:
            began = bench.clock()
            saver.start(contents=contents_of(learner))
            stall = time.perf_counter() - began
            saver.wait()
            return 1e3 * stall / size_gb

        times = alternate({"trainyard": stall_ms, "plain": plain_ms}, bench.rounds + 1)
    times = {name: values[1:] for name, values in times.items()}
    say(f"  checkpoints of {size_gb:.3f} GB: {times}")
    shutil.rmtree(folder.root)
    bench.clear()
    return Section(
        title="Checkpoints",
        rows=(
            Row(what="training stands still", unit="ms/GB", values=times["trainyard"]),
            Row(what="torch.save in the training thread", unit="ms/GB", values=times["plain"]),
            Row(
                what="time of trainyard over torch.save",
                unit="x",
                values=ratios(times["trainyard"], times["plain"]),
            ),
        ),
        notes=(
            f"Weights and AdamW state of the language model, {size_gb:.2f} GB, to the local disk. The "
            "trainer copies them to host memory while training waits, and writes them beside training.",
        ),
    )


def contents_of(learner: Learner) -> dict[str, Any]:
    """Return what the trainer saves of a model that is not sharded."""
    return {MODEL: learner.network.state_dict(), STATE: {"learner": learner.state()}}


def fill_optimizer(learner: Learner) -> None:
    """Make one step, so that the optimizer has its state."""
    for weight in learner.network.parameters():
        weight.grad = torch.zeros_like(weight)
    for optimizer in learner.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def tensors_in(content: Any) -> Iterator[torch.Tensor]:
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, dict):
        for each in content.values():
            yield from tensors_in(each)
    elif isinstance(content, (list, tuple)):
        for each in content:
            yield from tensors_in(each)


# Images from files.


class Files(Dataset[tuple[torch.Tensor, int]]):
    """A folder of JPEG files per class, as a plain PyTorch program reads them."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*/*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file = self.files[index]
        return decode_image(read_file(str(file)), ImageReadMode.RGB), int(file.parent.name)


def files(bench: Bench) -> Section:
    """A ResNet on JPEG files, which processes decode: trainyard beside a plain loop and DataLoader."""
    size, model = bench.size, bench.size.models[0]
    path = data.jpegs(size.num_files, size.image_size)
    prepared = data.opened(path)
    config = bench.image_config(model, path)
    settings = bench.settings(config, prepared.info)
    length = Length.of(config, prepared.num_train)
    batches = TorchBatches(prepared, length, Trained(), settings.worker, config)
    loader = DataLoader(
        Files(path.with_name(f"{path.name}.source")),
        batch_size=size.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=decode_workers(),
        persistent_workers=True,
        pin_memory=bench.device.type == "cuda",
    )

    def plain_epochs() -> Iterator[Iterable[Batch]]:
        for _ in count():
            yield (Batch({"image": pixels, "label": labels}, labels) for pixels, labels in loader)

    speeds = compare(
        settings,
        bench,
        lambda: first(map(batches.epoch, count()), settings),
        lambda: first(plain_epochs(), settings),
    )
    bench.clear()
    return Section(
        title="Images from JPEG files",
        rows=tuple(speed_rows(model, "images/s", speeds)),
        notes=(
            f"{prepared.num_train:,} JPEG files of {size.image_size}x{size.image_size}, decoded by "
            f"{decode_workers()} processes in each loop; otherwise as above.",
        ),
    )


def first(epochs: Iterable[Iterable[Batch]], settings: Settings) -> Iterator[Batch]:
    """Return as many batches as are trained, from as many epochs as needed."""
    return islice(chain.from_iterable(epochs), settings.skip + settings.steps)


SECTIONS: dict[str, Callable[[Bench], Section]] = {
    "images": images,
    "language_model": language_model,
    "own_recipe": own_recipe,
    "fsdp2": fsdp2,
    "optimizers": optimizers,
    "checkpoints": checkpoints,
    "files": files,
}


def measure(options: Options) -> list[Section]:
    device = options.more.device
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: there is no CUDA GPU here. Use --device cpu to try the bench.")
    if device == "cpu":
        torch.set_num_threads(1)
    bench = Bench.of(device, options)
    found = []
    for name in options.more.only or SECTIONS:
        say(f"bench gpu, {name}")
        found.append(SECTIONS[name](bench))
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    main(
        measure,
        device={"choices": ("cuda", "cpu"), "default": "cuda", "help": "what to measure"},
        only={"nargs": "*", "choices": list(SECTIONS), "help": "measure these sections alone"},
    )
