"""Labels for all rows of tables of images, by Ray Data: tasks read and decode, actors hold the model."""

from __future__ import annotations

import argparse
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

from trainyard_trainer.config.scaling import DATA_CPUS, Scaling
from trainyard_trainer.data.loading.ray_source import from_ray
from trainyard_trainer.data.sources.lance_datasets import split_version
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.saved_model import Saved, read_saved
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem
from trainyard_trainer.terminal import Bar
from trainyard_trainer.tools.command_line import open_run
from trainyard_trainer.tools.prediction.batch_prediction import (
    Writer,
    answers_to,
    summary_of,
    summary_text,
)
from trainyard_trainer.tools.prediction.classifier import Classifier, require_recipe
from trainyard_trainer.tools.prediction.prediction_input import (
    Input,
    Stretch,
    open_inputs,
    read_stretch,
    stretches_of,
)

SUMMARY = "predictions.json"
"""The file of the output that summarises the predictions. It is written last."""

LABEL = "label"
"""The column that predictions are compared with, unless --label-column names one."""

SharedInputs = tuple[Sequence[Input], Sequence[Stretch], tuple[int, int, int]]
"""The input of all tasks: the files, the stretch of each task, and the shape of the model's images."""


class ReadRows:
    """The Ray Data task that reads one stretch of a file and decodes its images."""

    def __init__(
        self, inputs: ray.ObjectRef[SharedInputs], path: str, endpoint: str | None
    ) -> None:
        self._inputs, self._path, self._endpoint = inputs, path, endpoint

    def __call__(self, numbers: dict[str, Any]) -> Iterator[pa.Table]:
        inputs, stretches, shape = ray.get(self._inputs)
        filesystem, _ = open_filesystem(split_version(self._path)[0], self._endpoint)
        for number in numbers["item"]:
            stretch = stretches[number]
            yield from read_stretch(inputs[stretch.file], stretch, filesystem, shape)


class ClassifyRows:
    """The Ray Data actor that gives labels to rows of pixels."""

    def __init__(self, saved: ray.ObjectRef[Saved], top: int, batch_size: int) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._classifier = Classifier(ray.get(saved), device)
        self._top, self._batch_size = top, batch_size

    def __call__(self, rows: pa.Table) -> pa.Table:
        return answers_to(self._classifier, rows, top=self._top, batch_size=self._batch_size)


def labels_of(
    saved: Saved,
    inputs: Sequence[Input],
    path: str,
    endpoint: str | None,
    *,
    top: int,
    batch_size: int,
    scaling: Scaling,
) -> Iterator[pa.Table]:
    """Yield the labels of all rows, in the order of the rows. Raises RunError."""
    stretches: Sequence[Stretch] = list(stretches_of(inputs, saved.info.bytes_per_sample))
    if not stretches:
        return
    DataContext.get_current().execution_options.preserve_order = True
    shared_inputs = ray.put((inputs, stretches, saved.info.shape))
    dataset = (
        ray.data.from_items(list(range(len(stretches))), override_num_blocks=len(stretches))
        .map_batches(ReadRows(shared_inputs, path, endpoint).__call__, batch_size=1, num_cpus=1)
        .map_batches(
            ClassifyRows,
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
    """Use all of this machine: one actor per GPU, or one actor without a GPU."""
    gpus, cpus = torch.cuda.device_count(), os.cpu_count() or 1
    actors = gpus or 1
    return Scaling(
        num_workers=actors,
        use_gpu=gpus > 0,
        cpus_per_worker=max(1, (cpus - DATA_CPUS) // actors),
    )


def actor_cpus(scaling: Scaling) -> int:
    """Return the CPUs of an actor. Without a GPU, half of the CPUs compute and the others decode."""
    return 1 if scaling.use_gpu else (scaling.cpus_per_worker + 1) // 2


def predict_data(wanted: argparse.Namespace) -> None:
    """Write the predictions for a data set and print their summary. Raises TrainerError."""
    out = RunFolder(*open_filesystem(wanted.out, wanted.endpoint, names=("--out", "--endpoint")))
    if out.exists(out.root):
        raise ConfigError(f"--out = {wanted.out} exists already. Name another one, or remove it.")
    saved = read_saved(open_run(wanted.run, wanted.storage, wanted.endpoint), wanted.checkpoint)
    require_recipe(saved, "image_classification")
    inputs = open_inputs(wanted.data, wanted.endpoint, wanted.image_column, wanted.label_column)
    label_column = wanted.label_column or LABEL
    summary = {"run": saved.facts["run"], "checkpoint": saved.facts["checkpoint"]}
    summary |= {"data": wanted.data, "files": len(inputs)}
    summary |= _write(saved, inputs, out, label_column, wanted)
    out.write(f"{out.root}/{SUMMARY}", json.dumps(summary, indent=2))
    print(json.dumps(summary, indent=2) if wanted.json else summary_text(summary, label_column))


def _write(
    saved: Saved,
    inputs: Sequence[Input],
    out: RunFolder,
    label_column: str,
    wanted: argparse.Namespace,
) -> dict[str, Any]:
    """Write the predictions and return their summary; after an error the output is removed.

    Raises TrainerError.
    """
    began = time.monotonic()
    writer = Writer(
        inputs=inputs,
        filesystem=open_filesystem(split_version(wanted.data)[0], wanted.endpoint)[0],
        out=out,
        classes=saved.info.classes,
        top=wanted.top,
        label_column=label_column,
    )
    scaling = scaling_here()
    try:
        with ray_running(scaling), Bar("rows", sum(file.rows for file in inputs)) as bar:
            with redirect_stdout(sys.stderr):
                require_room(scaling)
            for table in labels_of(
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
