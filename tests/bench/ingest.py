"""How fast images come to the workers, without training: our loaders beside what a team writes itself.

    python -m tests.bench.ingest

All pipelines take turns in the same two worker processes, for several rounds. A turn is one or more epochs,
from a barrier until both workers have all their batches.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "train_image"))
os.environ |= {"PYTHONPATH": str(ROOT / "train_image"), "RAY_AUTH_MODE": "disabled"}

import trainyard_trainer.on_ray.driver  # noqa: E402, F401, I001 - first, for what Ray reads when it is imported

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
import ray  # noqa: E402
import ray.data  # noqa: E402
import ray.train.torch  # noqa: E402
import torch  # noqa: E402
from torch import distributed  # noqa: E402
from torchvision.io import decode_image  # noqa: E402

from tests.bench.rounds import Options, Row, Section, main, ratios, say  # noqa: E402
from trainyard_trainer.config.trainer_config import BuiltInConfig, TrainerConfig  # noqa: E402
from trainyard_trainer.data import image_codec, stored_rows  # noqa: E402
from trainyard_trainer.data.prepared import DatasetInfo, Prepared, Split  # noqa: E402
from trainyard_trainer.data.loading.batch import Batch  # noqa: E402
from trainyard_trainer.data.loading.ray_loader import RayBatches  # noqa: E402
from trainyard_trainer.data.loading.torch_loader import TorchBatches  # noqa: E402
from trainyard_trainer.run_folder.measurements.progress import Length, Trained  # noqa: E402
from trainyard_trainer.parallel.worker import Worker  # noqa: E402

WORKERS = 2
DATA_CPUS = 2
GLOBAL_BATCH = 256
ROUNDS = 7
ROUNDS_BY_ROW = 3
FILES = 8
WARM_EPOCHS = 2
MOST_BY_ROW = 100_000
"""Images; more would take minutes in each round."""
STORE_BYTES = 2**30
"""Ray's object store: data of more than a quarter of it are streamed."""

OURS = "Ray loader"
STREAMED = "Ray loader, streaming"
BY_HAND = "pyarrow and numpy by hand"
BY_HAND_ONCE = "the same, read once"
BY_ROW = "Ray Data, a function per row"

TORCH = "torch loader"

WAITING = (OURS, STREAMED, TORCH)
"""The pipelines of which the wait for the first batch of an epoch is measured."""
EPOCH_S = 1.0
"""How long the steps of an epoch take meanwhile."""
MOST_WAIT_MS = 50.0

Epochs = Callable[[int], Iterator[Any]]
"""One worker's batches of an epoch."""


# What a team writes itself.


def by_hand(data: Prepared, worker: Worker, size: int, *, is_read_once: bool) -> Epochs:
    """Each worker reads its own files and takes batches from them in random order."""
    files = list(data.train.files[worker.rank :: worker.world_size])
    is_raw, shape = data.info.encoding == "raw", data.info.shape

    def read() -> tuple[Any, np.ndarray]:
        table = pq.read_table(files, columns=["image", "label"])
        images = table["image"].combine_chunks()
        if is_raw:
            images = np.frombuffer(images.buffers()[2], np.uint8).reshape(-1, *shape)
        return images, table["label"].to_numpy()

    known = read() if is_read_once else None

    def epoch(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        images, labels = known or read()
        order = np.random.default_rng(epoch).permutation(len(labels))
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            pixels = torch.from_numpy(images[rows]) if is_raw else decoded(images, rows)
            yield pixels, torch.from_numpy(labels[rows])

    return epoch


def decoded(files: Any, rows: np.ndarray) -> torch.Tensor:
    data = (np.frombuffer(files[row].as_buffer(), np.uint8).copy() for row in rows.tolist())
    return torch.stack([decode_image(torch.from_numpy(file)) for file in data])


def rows_of(data: Prepared) -> ray.data.Dataset:
    """Ray Data as tutorials have it."""
    is_raw, shape = data.info.encoding == "raw", data.info.shape

    def to_pixels(row: dict[str, Any]) -> dict[str, Any]:
        if is_raw:
            pixels = np.frombuffer(row["image"], np.uint8).reshape(shape)
        else:
            pixels = decode_image(
                torch.frombuffer(bytearray(row["image"]), dtype=torch.uint8)
            ).numpy()
        return {"image": (pixels / 255).astype(np.float32), "label": row["label"]}

    return ray.data.read_parquet(list(data.train.files)).map(to_pixels)


def by_row(size: int) -> Epochs:
    shard = ray.train.get_dataset_shard("train")

    def epoch(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in shard.iter_torch_batches(batch_size=size, drop_last=True):
            yield batch["image"], batch["label"]

    return epoch


# The measurement.


@dataclass(kw_only=True)
class Pipeline:
    epochs: Epochs
    turn_epochs: int
    """So many that a turn takes about a second."""
    most_rounds: int = ROUNDS
    prepare: Callable[[], None] = lambda: None
    """What comes before a turn and is not measured."""


class Streaming:
    """A new stream for each turn: between turns it would read ahead for nothing."""

    def __init__(self, open_stream: Callable[[], RayBatches]) -> None:
        self.open_stream = open_stream

    def prepare(self) -> None:
        # Two sets of iterators take turns, so the processes of both have begun after two epochs.
        self.batches = self.open_stream()
        for epoch in range(WARM_EPOCHS):
            for _ in self.batches.epoch(epoch):
                pass

    def epoch(self, epoch: int) -> Iterator[Any]:
        return self.batches.epoch(WARM_EPOCHS + epoch)


def pipelines(data: Prepared, worker: Worker) -> dict[str, Pipeline]:
    size = GLOBAL_BATCH // worker.world_size
    is_raw = data.info.encoding == "raw"
    is_tiny = data.num_train <= MOST_BY_ROW
    many, few = (20 if is_tiny else 3, 10 if is_tiny else 3) if is_raw else (20, 3)

    def torch_batches(processes: int) -> Epochs:
        config = config_of(decode_workers=processes)
        length = Length.of(config, data.num_train)
        return TorchBatches(data, length, Trained(), worker, config).epoch

    def ray_batches(epochs: int, **options: Any) -> RayBatches:
        config = config_of(loader="ray")
        length = replace(Length.of(config, data.num_train), epochs=epochs)
        return RayBatches(data, length, Trained(), {}, worker, config, **options)

    streaming = Streaming(lambda: ray_batches(WARM_EPOCHS + few, held_share=0.0))
    found = {
        OURS: Pipeline(epochs=ray_batches(1, held_share=1.0).epoch, turn_epochs=many),
        STREAMED: Pipeline(epochs=streaming.epoch, turn_epochs=few, prepare=streaming.prepare),
        TORCH: Pipeline(epochs=torch_batches(0), turn_epochs=many if is_raw else few),
        BY_HAND: Pipeline(epochs=by_hand(data, worker, size, is_read_once=False), turn_epochs=few),
        BY_HAND_ONCE: Pipeline(
            epochs=by_hand(data, worker, size, is_read_once=True),
            turn_epochs=many if is_raw else few,
        ),
    }
    if is_tiny:
        found[BY_ROW] = Pipeline(epochs=by_row(size), turn_epochs=1, most_rounds=ROUNDS_BY_ROW)
    if not is_raw:
        found[f"{TORCH}, 1 process per worker"] = Pipeline(epochs=torch_batches(1), turn_epochs=few)
    return found


def config_of(**data: Any) -> TrainerConfig:
    return BuiltInConfig.model_validate(
        {
            "name": "ingest",
            "data": {"source": "digits", **data},
            "train": {
                "model": {"name": "resnet18", "in_channels": 1, "num_classes": 10},
                "epochs": 1,
                "global_batch_size": GLOBAL_BATCH,
            },
            "scaling": {"num_workers": WORKERS, "use_gpu": False, "cpus_per_worker": 1},
            "storage": {"path": "/tmp"},
        }
    )


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was measured of each pipeline."""

    images_per_s: dict[str, list[float]]
    """Of all workers together, in each round."""
    first_batch_ms: dict[str, list[float]]
    """How long worker 0 has waited for the first batch of each epoch that followed another one."""


def measure_worker(config: dict[str, Any]) -> Found:
    """Measure all pipelines."""
    context = ray.train.get_context()
    worker = Worker(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        device=torch.device("cpu"),
    )
    torch.set_num_threads(1)
    found = pipelines(config["data"], worker)
    rates: dict[str, list[float]] = {name: [] for name in found}
    for turn in range(config["rounds"] + 1):
        for name, pipeline in found.items():
            if turn > pipeline.most_rounds:
                continue
            pipeline.prepare()
            distributed.barrier()
            started = time.perf_counter()
            images = 0
            for epoch in range(pipeline.turn_epochs):
                images += sum(map(num_samples, pipeline.epochs(epoch)))
            distributed.barrier()
            seconds = time.perf_counter() - started
            if turn:  # the first one warms up
                rates[name].append(worker.sum(torch.tensor(images)).item() / seconds)
    step_s = config["epoch_s"] / (config["data"].num_train // GLOBAL_BATCH)
    waits = {name: first_batches_ms(found[name], step_s) for name in WAITING}
    return Found(images_per_s=rates, first_batch_ms=waits)


def first_batches_ms(pipeline: Pipeline, step_s: float) -> list[float]:
    """Return how long each epoch but the first one let a worker wait whose steps take so long."""
    pipeline.prepare()
    waits = []
    for epoch in range(pipeline.turn_epochs):
        began = time.perf_counter()
        batches = pipeline.epochs(epoch)
        next(batches)
        waits.append(1000 * (time.perf_counter() - began))
        for _ in batches:
            time.sleep(step_s)
    return waits[1:]


def num_samples(batch: Batch | tuple[torch.Tensor, torch.Tensor]) -> int:
    return len(batch) if isinstance(batch, Batch) else len(batch[0])


def measure_pipelines(data: Prepared, rounds: int, epoch_s: float) -> Found:
    with tempfile.TemporaryDirectory() as storage:
        trainer = ray.train.torch.TorchTrainer(
            measure_worker,
            train_loop_config={"data": data, "rounds": rounds, "epoch_s": epoch_s},
            scaling_config=ray.train.ScalingConfig(
                num_workers=WORKERS, resources_per_worker={"CPU": 1}
            ),
            run_config=ray.train.RunConfig(name="ingest", storage_path=storage),
            datasets={"train": rows_of(data)},
        )
        return trainer.fit().return_value


# Data.


def write(folder: Path, images: DatasetInfo, values: Any, labels: np.ndarray) -> Prepared:
    header = stored_rows.header_of(images.source, images.shape, images.encoding, images.classes)
    files, rows, first = [], [], 0
    for index, part in enumerate(np.array_split(np.arange(len(labels)), FILES)):
        path = folder / f"part-{index:05}.parquet"
        stretch = values.slice(first, len(part))
        path.write_bytes(stored_rows.write_part(header, path.name, first, stretch, labels[part]))
        files.append(str(path))
        rows.append(len(part))
        first += len(part)
    split = Split(files=tuple(files), rows=tuple(rows))
    return Prepared(info=images, train=split, valid=split, path=str(folder), endpoint=None)


def images_of(shape: tuple[int, int, int], encoding: Any) -> DatasetInfo:
    grey = (0.5,) * shape[0]
    classes = tuple(map(str, range(10)))
    return DatasetInfo(
        source="bench", shape=shape, encoding=encoding, classes=classes, mean=grey, std=grey
    )


def write_tiny(folder: Path, count: int) -> Prepared:
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (count, 1, 28, 28), np.uint8)
    values = stored_rows.pixels_to_values(pixels)
    return write(folder, images_of((1, 28, 28), "raw"), values, random.integers(0, 10, count))


def write_pictures(folder: Path, count: int) -> Prepared:
    """PNG files of 64x64 pixels, as smooth as photographs."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (count, 3, 8, 8), np.uint8)
    files = [image_codec.to_png(image_codec.resize(pixels, 64, 64)) for pixels in coarse]
    values = pa.array(files, pa.binary())
    return write(folder, images_of((3, 64, 64), "encoded"), values, random.integers(0, 10, count))


# The report.

TARGETS = {
    # Pixels in memory beside pixels in memory, files read anew beside files read anew.
    (OURS, BY_HAND_ONCE): 0.8,
    (STREAMED, BY_HAND): 0.8,
    (OURS, BY_ROW): 30.0,
    (STREAMED, BY_ROW): 30.0,
}
"""At least so many times the other; for tiny images."""


def section_of(title: str, found: Found, *, is_tiny: bool) -> Section:
    rates = found.images_per_s
    say("  " + ", ".join(f"{name}: {values[-1]:,.0f}" for name, values in rates.items()))
    rows = [
        Row(
            what=f"{name} over {other}",
            unit="x",
            # By row there are fewer rounds.
            values=ratios(rates[name][: len(rates[other])], rates[other]),
            at_least=least if is_tiny else None,
        )
        for (name, other), least in TARGETS.items()
        if other in rates
    ]
    speeds = [
        Row(what=name, unit="images/s", values=tuple(values)) for name, values in rates.items()
    ]
    waits = [
        Row(
            what=f"{name}: wait for the first batch of the next epoch",
            unit="ms",
            values=tuple(values),
            at_most=MOST_WAIT_MS,
        )
        for name, values in found.first_batch_ms.items()
    ]
    note = f"The waits are those of a worker whose steps take {EPOCH_S:g} s per epoch."
    return Section(title=title, rows=(*rows, *speeds, *waits), notes=(note,))


def measure(options: Options) -> list[Section]:
    rounds = options.rounds_or(ROUNDS)
    tiny, many, files = options.choose((60_000, 400_000, 6_000), (2_000, 3_000, 600))
    with tempfile.TemporaryDirectory(prefix="ty", dir="/tmp") as scratch:
        ray.init(
            address="local",
            num_cpus=WORKERS + DATA_CPUS,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=f"{scratch}/r",
        )
        sections = []
        for title, make, count in (
            (f"Ingest alone, {tiny:,} images of 28x28, raw pixels", write_tiny, tiny),
            (
                f"Ingest alone, {many:,} images of 28x28: more than a quarter of the store",
                write_tiny,
                many,
            ),
            (f"Ingest alone, {files:,} PNG files of 64x64x3", write_pictures, files),
        ):
            folder = Path(tempfile.mkdtemp(dir=scratch))
            found = measure_pipelines(make(folder, count), rounds, options.choose(EPOCH_S, 0.1))
            sections.append(section_of(title, found, is_tiny=make is write_tiny))
        ray.shutdown()
    return sections


if __name__ == "__main__":
    main(measure)
