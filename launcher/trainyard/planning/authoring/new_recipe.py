"""Write the skeleton of a run with a recipe of the user's own: a run file, a recipe and its test."""

from __future__ import annotations

import re
from pathlib import Path

from trainyard.errors import ConfigError
from trainyard.planning.authoring.init import existing_file, write_run
from trainyard.run_file.validation import check_name
from trainyard_trainer.run_files.programs.code_imports import is_reserved

CODE = "code"
"""The folder of the code beside the run file."""

RUN_FILE = """\
# A run with a recipe of your own: the class @CLASS@ in @CODE@/@MODULE@.py.
#   python -m pytest @CODE@        tests the recipe
#   trainyard train @FILE@         trains it on this machine
#   trainyard submit @FILE@        trains it on a cluster
name: @NAME@
resources: {workers: 2}
code: @CODE@
data:
  dataset: @MODULE@:Samples
train:
  recipe: @MODULE@:@CLASS@
  model: {width: 32}
  epochs: 10
  global_batch_size: 64
  optimizer: {name: adamw, learning_rate: 0.01}
"""

RECIPE = '''\
"""A recipe: its data set, its model and its loss. Replace each of them by your own."""

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional

from trainyard_trainer import Loss, Metric, Recipe, Settings


class Samples:
    """Points whose target is the product of two coordinates. A sample is a mapping of columns."""

    def __init__(self, split):
        count = 1024 if split == "train" else 256
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        self.points = torch.rand(count, 2, generator=generator) * 2 - 1
        self.targets = self.points.prod(dim=1)

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return {"point": self.points[index], "target": self.targets[index]}


class @CLASS@Settings(Settings):
    """The keys of train.model in the run file."""

    width: int = Field(default=32, ge=1)
    """Number of hidden units."""


class @CLASS@(Recipe[@CLASS@Settings]):
    settings = @CLASS@Settings
    metrics = (Metric(name="mae", direction="lower", description="mean absolute error"),)

    def build_model(self):
        width = self.config.width
        return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))

    def loss(self, model, batch):
        predicted = model(batch["point"]).squeeze(1)
        squared = functional.mse_loss(predicted, batch["target"], reduction="sum")
        absolute = (predicted - batch["target"]).abs().sum()
        return Loss(sum=squared, weight=len(batch), metrics={"mae": (absolute, len(batch))})

    def predict(self, model, batch):
        return {"product": model(batch["point"]).squeeze(1)}
'''

TEST = '''\
"""Tests of the recipe: python -m pytest @CODE@"""

import torch
from @MODULE@ import @CLASS@, @CLASS@Settings, Samples

from trainyard_trainer import Batch


def first_batch(recipe, size=32):
    samples = Samples("train")
    columns = recipe.collate([samples[index] for index in range(size)])
    return Batch(columns, torch.arange(size))


def test_the_loss_of_a_batch_is_the_sum_of_the_losses_of_its_samples():
    recipe = @CLASS@(@CLASS@Settings())
    model, batch = recipe.build_model(), first_batch(recipe)
    whole = recipe.loss(model, batch)
    single = [recipe.loss(model, batch.rows(row, row + 1)).sum for row in range(len(batch))]
    torch.testing.assert_close(whole.sum, torch.stack(single).sum())


def test_the_model_learns_one_batch():
    torch.manual_seed(0)
    recipe = @CLASS@(@CLASS@Settings())
    model, batch = recipe.build_model(), first_batch(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(100):
        loss = recipe.loss(model, batch)
        optimizer.zero_grad()
        (loss.sum / loss.weight).backward()
        optimizer.step()
        losses.append(loss.sum.item())
    assert losses[-1] < losses[0] / 2
'''


def files_of(file: Path, name: str | None, module: str) -> dict[Path, str]:
    """Return path and text of each file: the run file, the recipe and its test.

    `name` is the run's name, by default the module's. `module` is the name of the recipe's module; the
    class has the same name in camel case. Raises ConfigError if one of them cannot be such a name.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module) or is_reserved(module):
        raise ConfigError(
            f"--recipe = {module} cannot be the name of your module",
            "Use lower-case letters, digits and _, such as my_model, and no name of Python or PyTorch.",
        )
    words = {
        "CLASS": "".join(word.capitalize() for word in module.split("_")),
        "MODULE": module,
        "NAME": check_name(name or module.replace("_", "-"), "--name"),
        "CODE": CODE,
        "FILE": file.name,
    }
    code = file.parent / CODE
    texts = {
        file: RUN_FILE,
        code / f"{module}.py": RECIPE,
        code / f"test_{module}.py": TEST,
    }
    return {path: _filled(text, words) for path, text in texts.items()}


def _filled(text: str, words: dict[str, str]) -> str:
    return re.sub(r"@([A-Z]+)@", lambda match: words[match[1]], text)


def write_files(files: dict[Path, str]) -> None:
    """Write new files. Raises ConfigError, before any is written, if one of them exists already."""
    for path in files:
        if path.exists():
            raise existing_file(path)
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error}") from error
        write_run(path, text)
