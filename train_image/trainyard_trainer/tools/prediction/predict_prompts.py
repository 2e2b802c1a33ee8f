"""Answers to all prompts of a file, by Ray Data: actors hold the model."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
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

from trainyard_trainer.config.scaling import Scaling
from trainyard_trainer.config.training.recipes import CAUSAL_LM
from trainyard_trainer.data.loading.ray_source import from_ray
from trainyard_trainer.data.prepared import PromptAs
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.saved_model import Saved, read_saved
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem
from trainyard_trainer.terminal import Bar
from trainyard_trainer.tools.command_line import open_run
from trainyard_trainer.tools.prediction.batch_prediction import summary_of, summary_text
from trainyard_trainer.tools.prediction.chat import Assistant, prompts_for, with_base_model
from trainyard_trainer.tools.prediction.classifier import require_recipe
from trainyard_trainer.tools.prediction.predict_data import actor_cpus, scaling_here
from trainyard_trainer.tools.prediction.prompt_file import LABEL, PromptFile, answers_to

BATCHES = 8
"""The number of batches that an actor gets at once, so that it can sort their prompts by length."""


class AnswerRows:
    """The Ray Data actor that answers the prompts of rows."""

    def __init__(
        self,
        saved: ray.ObjectRef[Saved],
        *,
        length: int,
        temperature: float,
        seed: int,
        prompt_as: PromptAs | None,
        batch_size: int,
    ) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._assistant = Assistant(
            ray.get(saved),
            device,
            length=length,
            temperature=temperature,
            seed=seed,
            prompt_as=prompt_as,
        )
        self._batch_size = batch_size

    def __call__(self, rows: pa.Table) -> pa.Table:
        return answers_to(self._assistant, rows, batch_size=self._batch_size)


def predict_prompts(wanted: argparse.Namespace) -> None:
    """Write the answers to a file of prompts and print their summary. Raises TrainerError."""
    (path,) = wanted.files
    out = RunFolder(*open_filesystem(wanted.out, wanted.endpoint, names=("--out", "--endpoint")))
    file = PromptFile.open(path, out, wanted.out, wanted.endpoint, wanted.label_column)
    saved = read_saved(open_run(wanted.run, wanted.storage, wanted.endpoint), wanted.checkpoint)
    require_recipe(saved, CAUSAL_LM)
    saved = with_base_model(saved, wanted.base_model)
    prompts_for(saved, wanted.prompt_as)  # raises before actors do
    label_column = wanted.label_column or LABEL
    began = time.monotonic()
    scaling = scaling_here()
    with ray_running(scaling), Bar("rows", file.num_rows) as bar:
        with redirect_stdout(sys.stderr):
            require_room(scaling)
        answers = []
        for table in _answered(file, saved, wanted, scaling):
            answers.append(table)
            bar.advance(len(table))
    found = pa.concat_tables(answers)
    errors = found["error"].drop_null()
    if len(errors) == len(found):
        raise ConfigError(
            f"none of the {len(found):,} rows can be answered. The first: {errors[0]}."
        )
    counts = file.write(found, label_column)
    summary = {"run": saved.facts["run"], "checkpoint": saved.facts["checkpoint"], "data": path}
    summary |= summary_of(counts, time.monotonic() - began)
    print(json.dumps(summary, indent=2) if wanted.json else summary_text(summary, label_column))
    if counts.first_error and not wanted.json:
        print(f"the first of them: {counts.first_error}")


def _answered(
    file: PromptFile, saved: Saved, wanted: argparse.Namespace, scaling: Scaling
) -> Iterator[pa.Table]:
    """Yield the answers of all rows, in the order of the rows."""
    DataContext.get_current().execution_options.preserve_order = True
    # Each actor gets a share of a small file.
    share = -(-file.num_rows // scaling.num_workers)
    parts: list[Any] = [
        ray.put(part) for part in file.parts(min(share, BATCHES * wanted.batch_size))
    ]
    dataset = ray.data.from_arrow_refs(parts).map_batches(
        AnswerRows,
        fn_constructor_args=(ray.put(saved),),
        fn_constructor_kwargs={
            name: getattr(wanted, name)
            for name in ("length", "temperature", "seed", "prompt_as", "batch_size")
        },
        batch_size=None,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=scaling.num_workers),
        num_cpus=actor_cpus(scaling),
        num_gpus=1 if scaling.use_gpu else 0,
    )
    yield from from_ray(iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow")))
