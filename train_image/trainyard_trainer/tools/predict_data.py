"""Labels for all rows of Parquet files, by Ray Data: tasks read and decode, actors hold the model.

python -m trainyard_trainer.tools.predict_data RUN --data PATH --out PATH [--top K] [--checkpoint NAME]
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any

from trainyard_trainer.on_ray.ray_cluster import (  # first: Ray reads some variables when it is imported
    ray_running,
    require_room,
)

# isort: split
import pyarrow as pa
import ray
import ray.data
import torch
from ray.data import ActorPoolStrategy, DataContext

from trainyard_trainer.config.trainer_config import DATA_CPUS, Scaling
from trainyard_trainer.data.loading.ray_loader import from_ray
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.saved_model import DELIVERED, Saved, read_saved
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem
from trainyard_trainer.terminal import Bar
from trainyard_trainer.tools.batch_prediction import (
    Input,
    Stretch,
    Writer,
    answers_to,
    open_inputs,
    read_stretch,
    stretches_of,
    summary_of,
    summary_text,
)
from trainyard_trainer.tools.command_line import Arguments, add_run, exit_code_of, open_run
from trainyard_trainer.tools.predict import Oracle, require_pictures

SUMMARY = "predictions.json"
"""In the output: what it is of, in numbers. It is written last."""

LABEL = "label"
"""The column to compare with, where nobody names one."""

Work = tuple[Sequence[Input], Sequence[Stretch], tuple[int, int, int]]
"""What all tasks share: the files, what each task reads of them, and the shape of the model's images."""


class Read:
    """A task: a stretch of a file -> rows with pixels."""

    def __init__(self, work: ray.ObjectRef[Work], path: str, endpoint: str | None) -> None:
        self._work, self._path, self._endpoint = work, path, endpoint

    def __call__(self, numbers: dict[str, Any]) -> Iterator[pa.Table]:
        inputs, stretches, shape = ray.get(self._work)
        filesystem, _ = open_filesystem(self._path, self._endpoint)
        for number in numbers["item"]:
            stretch = stretches[number]
            yield from read_stretch(inputs[stretch.file], stretch, filesystem, shape)


class Ask:
    """An actor: rows with pixels -> answers."""

    def __init__(self, saved: ray.ObjectRef[Saved], top: int, batch_size: int) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._oracle = Oracle(ray.get(saved), device)
        self._top, self._batch_size = top, batch_size

    def __call__(self, rows: pa.Table) -> pa.Table:
        return answers_to(self._oracle, rows, top=self._top, batch_size=self._batch_size)


def answers(
    saved: Saved,
    inputs: Sequence[Input],
    path: str,
    endpoint: str | None,
    *,
    top: int,
    batch_size: int,
    scaling: Scaling,
) -> Iterator[pa.Table]:
    """What the model says of all rows, in their order. Raises RunError."""
    stretches: Sequence[Stretch] = list(stretches_of(inputs, saved.images.bytes_per_image))
    if not stretches:
        return
    DataContext.get_current().execution_options.preserve_order = True
    work = ray.put((inputs, stretches, saved.images.shape))
    dataset = (
        ray.data.from_items(list(range(len(stretches))), override_num_blocks=len(stretches))
        .map_batches(Read(work, path, endpoint).__call__, batch_size=1, num_cpus=1)
        .map_batches(
            Ask,
            fn_constructor_args=(ray.put(saved), top, batch_size),
            batch_size=None,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(size=scaling.num_workers),
            num_cpus=actor_cpus(scaling),
            num_gpus=1 if scaling.use_gpu else 0,
        )
    )
    yield from from_ray(iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow")))


def scaling_here() -> Scaling:
    """An actor per GPU of this machine, or one; all of its CPUs."""
    gpus, cpus = torch.cuda.device_count(), os.cpu_count() or 1
    actors = gpus or 1
    return Scaling(
        num_workers=actors,
        use_gpu=gpus > 0,
        cpus_per_worker=max(1, (cpus - DATA_CPUS) // actors),
    )


def actor_cpus(scaling: Scaling) -> int:
    """Without a GPU half of them compute, and the rest decodes."""
    return 1 if scaling.use_gpu else (scaling.cpus_per_worker + 1) // 2


def main(arguments: list[str] | None = None) -> int:
    parser = Arguments(prog="python -m trainyard_trainer.tools.predict_data")
    add_run(parser)
    parser.add_argument("--data", required=True, help="Parquet files of images")
    parser.add_argument("--out", required=True, help="where predictions go")
    parser.add_argument("--image-column", default="image")
    parser.add_argument("--label-column", help="to compare with; without it label, if there is one")
    parser.add_argument("--checkpoint", default=DELIVERED, help="delivered, last, best or a name")
    parser.add_argument("--top", type=int, default=1, help="labels per image")
    parser.add_argument("--batch-size", type=int, default=64, help="images at once")
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args(arguments)
    if min(wanted.top, wanted.batch_size) < 1:
        parser.error("--top and --batch-size must be at least 1")
    out = RunFolder(*open_filesystem(wanted.out, wanted.endpoint, names=("--out", "--endpoint")))
    if out.exists(out.root):
        raise ConfigError(f"--out = {wanted.out} exists already. Name another one, or remove it.")
    saved = read_saved(open_run(wanted.run, wanted.storage, wanted.endpoint), wanted.checkpoint)
    require_pictures(saved)
    inputs = open_inputs(wanted.data, wanted.endpoint, wanted.image_column, wanted.label_column)
    wanted.label_column = wanted.label_column or LABEL
    summary = {"run": saved.facts["run"], "checkpoint": saved.facts["checkpoint"]}
    summary |= {"data": wanted.data, **predict_data(saved, inputs, out, wanted)}
    out.write(f"{out.root}/{SUMMARY}", json.dumps(summary, indent=2))
    print(
        json.dumps(summary, indent=2) if wanted.json else summary_text(summary, wanted.label_column)
    )
    return 0


def predict_data(
    saved: Saved, inputs: Sequence[Input], out: RunFolder, wanted: Any
) -> dict[str, Any]:
    """Write the predictions; what is left half written by an error is removed. Raises TrainerError."""
    began = time.monotonic()
    writer = Writer(
        inputs=inputs,
        filesystem=open_filesystem(wanted.data, wanted.endpoint)[0],
        out=out,
        classes=saved.images.classes,
        top=wanted.top,
        label_column=wanted.label_column,
    )
    scaling = scaling_here()
    try:
        with ray_running(scaling), Bar("rows", sum(file.rows for file in inputs)) as bar:
            with redirect_stdout(sys.stderr):
                require_room(scaling)
            for table in answers(
                saved,
                inputs,
                wanted.data,
                wanted.endpoint,
                top=wanted.top,
                batch_size=wanted.batch_size,
                scaling=scaling,
            ):
                writer.add(table)
                bar.advance(len(table))
            writer.finish()
        if writer.rows and writer.bad_rows == writer.rows:
            raise ConfigError(
                f"none of the {writer.rows:,} rows of {wanted.data} has an image that can be used. "
                f"The first: {writer.first_error}."
            )
    except BaseException:
        out.delete(out.root)
        raise
    return summary_of(writer, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
