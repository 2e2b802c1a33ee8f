"""Predictions and exports of a user's recipe: by its own methods, and only with its code trusted."""

from __future__ import annotations

import hashlib
import io
import tarfile
from base64 import b64encode
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from own_recipes import own_config
from pyarrow import parquet
from training import open_folder, train_here

from trainyard_trainer.config.trainer_config import CODE_VARIABLE, OwnRecipeConfig
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.saved_model import read_saved
from trainyard_trainer.run_folder import code_archive
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.tools.export import export
from trainyard_trainer.tools.prediction.own_prediction import predict_split, write_table

CPU = torch.device("cpu")

RECIPE = """
import torch
from regression import Patients, Regression
from trainyard_trainer import ExampleInputs

class Predicting(Regression):
    def predict(self, model, batch):
        return PREDICTED

    def example_inputs(self, count):
        return ExampleInputs(tensors={"features": torch.randn(count, 10)})
"""
PREDICTED = '{"target": model(batch["features"]).squeeze(1), "pair": batch["features"][:, :2]}'


def trained(
    code: Path,
    storage: Path,
    predicted: str = PREDICTED,
) -> tuple[OwnRecipeConfig, RunFolder]:
    """Train a recipe for an epoch. Its code lies in the run's folder, too."""
    name = f"predicting_{storage.name.replace('-', '_')}"
    (code / f"{name}.py").write_text(RECIPE.replace("PREDICTED", predicted))
    archive = archive_of(code / f"{name}.py")
    sha256 = hashlib.sha256(archive).hexdigest()
    config = own_config(storage, recipe=f"{name}:Predicting", epochs=1).model_copy(
        update={"code_sha256": sha256}
    )
    folder = open_folder(config)
    environment = {CODE_VARIABLE: b64encode(archive).decode()}
    code_archive.store(folder, sha256, environment)
    folder.write(folder.run, config.model_dump_json())
    train_here(config)
    return config, folder


def archive_of(file: Path) -> bytes:
    """Pack one file as the launcher packs a folder of code."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(file, file.name)
    return packed.getvalue()


def predictions(folder: RunFolder, **options: Any) -> pa.Table:
    saved = read_saved(folder, "last", trusts_code=True)
    return predict_split(folder, saved, "valid", **{"batch_size": 32, "device": CPU} | options)


def test_each_sample_of_a_split_is_predicted_in_its_order(code: Path, tmp_path: Path) -> None:
    _, folder = trained(code, tmp_path)
    table = predictions(folder)
    assert table.column_names == ["id", "target", "pair"]
    assert table["id"].to_pylist() == list(range(88))
    assert table.schema.field("pair").type == pa.list_(pa.float32(), 2)
    other = predictions(folder, batch_size=7)["target"].to_numpy()
    torch.testing.assert_close(table["target"].to_numpy(), other, rtol=1e-5, atol=1e-4)


def test_predictions_are_written_as_parquet_and_json_lines(code: Path, tmp_path: Path) -> None:
    _, folder = trained(code, tmp_path)
    table = predictions(folder)
    write_table(table, tmp_path / "new/p.parquet")
    assert parquet.read_table(tmp_path / "new/p.parquet").equals(table)
    write_table(table, tmp_path / "p.jsonl")
    assert len((tmp_path / "p.jsonl").read_text().splitlines()) == 88
    with pytest.raises(ConfigError, match=r"has to end in .parquet or .jsonl"):
        write_table(table, tmp_path / "p.txt")


@pytest.mark.parametrize(
    ("predicted", "problem"),
    [
        ("3", "It returned int"),
        (
            '{"a": batch["features"][:5]}',
            r"with 32 rows, one for each sample. It returned a \(5, 10\)",
        ),
        ('{"a": [1]}', "It returned a list"),
        ("batch['nothing']", r"predict failed: KeyError: 'nothing' \(.*predicting_.*.py, line 8"),
    ],
)
def test_predictions_that_are_not_one_for_each_sample_are_refused(
    code: Path,
    tmp_path: Path,
    predicted: str,
    problem: str,
) -> None:
    _, folder = trained(code, tmp_path, predicted)
    with pytest.raises(ConfigError, match=problem):
        predictions(folder)


def test_a_recipe_without_predictions_says_what_to_define(code: Path, tmp_path: Path) -> None:
    config = own_config(tmp_path, epochs=1)
    folder = open_folder(config)
    folder.write(folder.run, config.model_dump_json())
    train_here(config)
    with pytest.raises(ConfigError, match=r"define predict\(self, model, batch\)"):
        predictions(folder)
    with pytest.raises(ConfigError, match=r"define example_inputs\(self, count\)"):
        export(folder, out=None, endpoint=None, kind="pt2", which="last")


def test_code_of_the_folder_is_run_only_if_it_is_trusted(code: Path, tmp_path: Path) -> None:
    _, folder = trained(code, tmp_path)
    saved = read_saved(folder, "last")
    assert saved.weights
    with pytest.raises(ConfigError, match="Add --trust-code to run this code"):
        saved.build()
    options: dict[str, Any] = {"out": None, "endpoint": None, "which": "last"}
    assert export(folder, kind="state_dict", **options).endswith(".pt")
    with pytest.raises(ConfigError, match="--trust-code"):
        export(folder, kind="pt2", **options)


@pytest.mark.parametrize("kind", ["torchscript", "pt2"])
def test_a_recipe_with_example_inputs_is_exported(code: Path, tmp_path: Path, kind: str) -> None:
    _, folder = trained(code, tmp_path)
    file = export(folder, out=None, endpoint=None, kind=kind, which="last", trusts_code=True)
    loaded = torch.jit.load(file) if kind == "torchscript" else torch.export.load(file).module()
    network = read_saved(folder, "last", trusts_code=True).build()
    inputs = torch.randn(5, 10)
    torch.testing.assert_close(loaded(inputs), network(inputs))
