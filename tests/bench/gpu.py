"""The trainer's loop on a GPU beside a plain PyTorch loop with the same settings, and the share of the peak.

    python -m tests.bench.gpu [--device cpu] [--quick]

Synthetic images show the loop alone: one batch in pinned memory, moved to the device at each step. Real ones
are JPEGs, decoded meanwhile by as many processes as there are CPUs to spare. `--device cpu` takes the same
way where there is no GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode
from torchvision.io import ImageReadMode, decode_image, read_file

from tests.bench import data, runs
from tests.bench.loops import Settings, again_and_again, by_hand, ours, same_batch
from tests.bench.rounds import Options, Row, Section, alternate, main, ratios, say
from trainyard_trainer.config.models import Model
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.torch_loader import TorchBatches
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.parallel.strategy import Worker
from trainyard_trainer.recipes.image_classification.model import build_model
from trainyard_trainer.run_folder.progress import Length, Trained

LEAST_RATIO = 0.98

PEAK_TFLOPS = {
    # Dense, by NVIDIA's data sheets: (bf16, tf32).
    "H200": (989, 494),
    "H100 PCIe": (756, 378),
    "H100 NVL": (835, 417),
    "H100": (989, 494),
    "A100": (312, 156),
    "L40S": (362, 183),
    "L4": (121, 60),
    "A10": (125, 62),
}
"""By what stands in the device's name; the first that fits counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How much is computed."""

    models: tuple[str, ...]
    image_size: int
    batch_size: int
    steps: int
    skip: int
    pictures: int
    run_s: float
    """Of a whole run, once it is steady."""


FULL = Size(
    models=("resnet18", "resnet50"),
    image_size=224,
    batch_size=256,
    steps=40,
    skip=10,
    pictures=5_000,
    run_s=20.0,
)
SMALL = Size(
    models=("resnet18",), image_size=32, batch_size=16, steps=4, skip=1, pictures=200, run_s=0.5
)


def peak_tflops(name: str, precision: str) -> float | None:
    """What the device can do at most, if it is known."""
    for known, (bf16, tf32) in PEAK_TFLOPS.items():
        if known in name:
            return {"bf16": bf16, "tf32": tf32}[precision]
    return None


def flops_per_image(model: Model) -> float:
    """Floating-point operations of one forward and backward pass."""
    with torch.device("meta"):
        network = build_model(model).train()
        images = torch.empty(2, model.in_channels, model.image_size, model.image_size)
        with FlopCounterMode(display=False) as counter:
            network(images).sum().backward()
    return counter.get_total_flops() / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where is measured, and with what."""

    device: torch.device
    name: str
    size: Size
    rounds: int
    path: Path
    data: Prepared

    @property
    def precisions(self) -> tuple[str, ...]:
        # tf32 is what convolutions have on a GPU where nobody asks for anything.
        return ("tf32", "bf16") if self.device.type == "cuda" else ("fp32",)

    def config(self, model: str, precision: str, *, channels_last: bool) -> TrainerConfig:
        network = {
            "name": model,
            "in_channels": 3,
            "num_classes": data.CLASSES,
            "image_size": self.size.image_size,
        }
        return runs.config(
            f"gpu-{model}",
            self.path,
            data__decode_workers=decoders(),
            train__model=network,
            train__global_batch_size=self.size.batch_size,
            train__precision=precision,
            train__channels_last=channels_last,
            scaling__num_workers=1,
            scaling__use_gpu=self.device.type == "cuda",
            scaling__cpus_per_worker=decoders(),
        )

    def settings(self, config: TrainerConfig) -> Settings:
        return Settings(
            config=config,
            images=self.data.info,
            worker=Worker(device=self.device),
            steps=self.size.steps,
            skip=self.size.skip,
            clock=clock_of(self.device),
        )


def open_place(device: str, options: Options) -> Place:
    size = options.choose(FULL, SMALL)
    path = data.jpegs(size.pictures, size.image_size)
    return Place(
        device=torch.device(device),
        name=torch.cuda.get_device_name() if device == "cuda" else "the CPU",
        size=size,
        rounds=options.rounds_or(3),
        path=path,
        data=data.opened(path),
    )


def clock_of(device: torch.device) -> Callable[[], float]:
    """A clock that waits until the device has done what it was told."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def decoders() -> int:
    """Processes that decode: as many as there are CPUs beside the loop's own."""
    return max(len(os.sched_getaffinity(0)) - 1, 1)


# Synthetic images.


def synthetic(place: Place) -> Section:
    rows: list[Row] = []
    for model in place.size.models:
        for precision in place.precisions:
            for channels_last in (False, True):
                title = f"{model}, {precision}{', channels_last' if channels_last else ''}"
                config = place.config(model, precision, channels_last=channels_last)
                settings = place.settings(config)
                batch = same_batch(settings)
                speeds = compare(settings, place, *[partial(again_and_again, batch, settings)] * 2)
                rows += rows_of(title, speeds)
                rows += share_of_peak(title, speeds["ours"], place, config)
    size = place.size
    notes = (
        f"{place.name}; images of {size.image_size}x{size.image_size}, batch of {size.batch_size}, "
        "fused SGD. Both loops move uint8 from pinned memory and normalise on the device.",
    )
    return Section(title="A GPU, synthetic images", rows=tuple(rows), notes=notes)


def compare(
    settings: Settings,
    place: Place,
    our_batches: Callable[[], Iterable[Batch]],
    their_batches: Callable[[], Iterable[Batch]],
) -> dict[str, tuple[float, ...]]:
    """Images per second of both loops."""
    our_loop, their_loop = ours(settings), by_hand(settings)
    speeds = alternate(
        {
            "ours": lambda: our_loop(our_batches()).samples_per_s,
            "by hand": lambda: their_loop(their_batches()).samples_per_s,
        },
        place.rounds,
    )
    say(
        f"  {settings.config.train.model.name}: "
        + str({k: round(v[-1]) for k, v in speeds.items()})
    )
    return speeds


def rows_of(title: str, speeds: dict[str, tuple[float, ...]]) -> list[Row]:
    values = ratios(speeds["ours"], speeds["by hand"])
    return [
        Row(what=f"{title}: over by hand", unit="x", values=values, at_least=LEAST_RATIO),
        Row(what=f"{title}: ours", unit="images/s", values=speeds["ours"]),
    ]


def share_of_peak(
    title: str, speeds: tuple[float, ...], place: Place, config: TrainerConfig
) -> list[Row]:
    """None where the peak is not known."""
    peak = peak_tflops(place.name, config.train.precision)
    if peak is None:
        return []
    flops = flops_per_image(config.train.model)
    shares = tuple(100 * speed * flops / (peak * 1e12) for speed in speeds)
    return [Row(what=f"{title}: of {peak} TFLOP/s", unit="%", values=shares)]


# Real images.


class Files(Dataset[tuple[torch.Tensor, int]]):
    """A folder of pictures per class, as one writes it by hand."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*/*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file = self.files[index]
        return decode_image(read_file(str(file)), ImageReadMode.RGB), int(file.parent.name)


def real(place: Place) -> Section:
    rows: list[Row] = []
    for model in place.size.models:
        config = place.config(model, place.precisions[-1], channels_last=True)
        title = f"{model}, {config.train.precision}, channels_last"
        settings = place.settings(config)
        speeds = compare(
            settings, place, our_pictures(place, settings), their_pictures(place, settings)
        )
        rows += rows_of(title, speeds)
    rows += whole_runs(place, config, title)
    notes = (
        f"{place.name}; {place.data.num_train} JPEGs, decoded by {decoders()} processes in each loop.",
    )
    return Section(title="A GPU, real images", rows=tuple(rows), notes=notes)


def our_pictures(place: Place, settings: Settings) -> Callable[[], Iterator[Batch]]:
    length = Length.of(settings.config, place.data.num_train)
    batches = TorchBatches(place.data, length, Trained(), settings.worker, settings.config)
    return lambda: first(map(batches.epoch, count()), settings)


def their_pictures(place: Place, settings: Settings) -> Callable[[], Iterator[Batch]]:
    is_pinned = place.device.type == "cuda"
    loader = DataLoader(
        Files(place.path.with_name(f"{place.path.name}.source")),
        batch_size=place.size.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=decoders(),
        persistent_workers=True,
        pin_memory=is_pinned,
    )
    epochs = ((Batch(pixels, labels, labels) for pixels, labels in loader) for _ in count())
    return lambda: first(epochs, settings)


def first(epochs: Iterable[Iterable[Batch]], settings: Settings) -> Iterator[Batch]:
    """As many batches as are learnt from, from as many epochs as it takes."""
    return islice(chain.from_iterable(epochs), settings.skip + settings.steps)


def whole_runs(place: Place, config: TrainerConfig, title: str) -> list[Row]:
    """Our whole program on Ray, with both loaders."""
    ways = {}
    for loader in ("torch", "ray"):
        loading = config.data.model_copy(update={"loader": loader})
        ways[loader] = partial(
            runs.samples_per_s,
            config.model_copy(update={"data": loading}),
            "ray",
            seconds=place.size.run_s,
            skip_s=place.size.run_s / 4,
        )
    speeds = alternate(ways, place.rounds)
    values = ratios(speeds["ray"], speeds["torch"])
    return [
        Row(what=f"{title}: Ray loader over torch loader, whole runs", unit="x", values=values),
        *(
            Row(what=f"{title}: whole run, {loader} loader", unit="images/s", values=values)
            for loader, values in speeds.items()
        ),
    ]


def measure(options: Options) -> list[Section]:
    device = options.more.device
    if device == "cuda" and not torch.cuda.is_available():
        return [Section(title="A GPU", rows=(), notes=("There is no GPU here.",))]
    place = open_place(device, options)
    return [synthetic(place), real(place)]


if __name__ == "__main__":
    main(measure, device={"choices": ("cuda", "cpu"), "default": "cuda"})
