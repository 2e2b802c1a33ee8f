"""Predictions and exports of a user's recipe: by its own methods, and only with its code trusted."""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
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
from trainyard_trainer.tools import predict
from trainyard_trainer.tools.export import export
from trainyard_trainer.tools.prediction.own_prediction import (
    predict_files,
    predict_split,
    write_table,
)

CPU = torch.device("cpu")

RECIPE = """
import torch
from regression import Patients, Regression
from trainyard_trainer import ExampleInputs

class Predicting(Regression):
    def predict(self, model, batch):
        return PREDICTED
OPENING
    def example_inputs(self, count):
        return ExampleInputs(tensors={"features": torch.randn(count, 10)})
"""
OPENING = """
    def open_samples(self, path):
        return Pages(path)

class Pages:
    def __init__(self, path):
        with open(path) as file:
            self.lines = file.read().splitlines()

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return {"features": torch.tensor([float(word) for word in self.lines[index].split()])}
"""
PREDICTED = '{"target": model(batch["features"]).squeeze(1), "pair": batch["features"][:, :2]}'


def trained(
    code: Path,
    storage: Path,
    predicted: str = PREDICTED,
    opening: str = "",
) -> tuple[OwnRecipeConfig, RunFolder]:
    """Train a recipe for an epoch. Its code lies in the run's folder, too."""
    name = f"predicting_{storage.name.replace('-', '_')}"
    (code / f"{name}.py").write_text(
        RECIPE.replace("PREDICTED", predicted).replace("OPENING", opening)
    )
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
        (
            "batch['nothing']",
            r"predict, on a batch with features float32 \(32, 10\), target float32 \(32,\) failed: "
            r"KeyError: 'nothing' \(.*predicting_.*.py, line 8",
        ),
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


def features_of(split: str = "valid") -> np.ndarray:
    """The features of the run's own patients, which other files have in the tests."""
    samples = sys.modules["regression"].Patients(split)
    features: np.ndarray = samples.features.numpy()
    return features


def file_predictions(folder: RunFolder, path: Path, **options: Any) -> pa.Table:
    saved = read_saved(folder, "last", trusts_code=True)
    options = {"endpoint": None, "batch_size": 32, "device": CPU} | options
    return predict_files(folder, saved, str(path), **options)


@pytest.mark.parametrize("name", ["test.parquet", "train/a.parquet", "new.npz"])
def test_rows_of_other_tables_are_predicted_without_their_targets(
    code: Path, tmp_path: Path, name: str
) -> None:
    _, folder = trained(code, tmp_path)
    features = features_of()
    file = tmp_path / "new" / name
    file.parent.mkdir(parents=True)
    if name.endswith(".npz"):
        np.savez(file, features=features)
    else:
        lists = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), 10)
        parquet.write_table(pa.table({"features": lists}), file, row_group_size=30)
    assert file_predictions(folder, tmp_path / "new").equals(predictions(folder))


def test_the_columns_of_other_files_are_shown_where_the_recipe_misses_one(
    code: Path, tmp_path: Path
) -> None:
    _, folder = trained(code, tmp_path)
    np.savez(tmp_path / "new.npz", age=np.arange(3.0))
    with pytest.raises(
        ConfigError,
        match=r"predict, on a batch with age float64 \(3,\) failed: KeyError: 'features' \(pred",
    ):
        file_predictions(folder, tmp_path / "new.npz")


def test_a_recipe_opens_other_files_than_tables_itself(code: Path, tmp_path: Path) -> None:
    _, folder = trained(code, tmp_path, opening=OPENING)
    file = tmp_path / "patients.txt"
    file.write_text("".join(" ".join(map(repr, map(float, row))) + "\n" for row in features_of()))
    assert file_predictions(folder, file).equals(predictions(folder))


@pytest.mark.parametrize(
    ("opening", "content", "problem"),
    [
        ("", "1 2", r"--data = .*a.txt is no table[^$]*define open_samples\(self, path\)"),
        (OPENING, "", r"--data = .*a.txt has no samples: .*open_samples\('.*a.txt'\) returned"),
        (
            OPENING,
            "1 b",
            r"--data = .*a.txt: reading sample 0 failed: ValueError: .*'b' \(predicting_",
        ),
        (OPENING, "1\n1 2", r"column features has shapes \[\(1,\), \(2,\)\]"),
        (
            OPENING.replace("Pages(path)", "3"),
            "1",
            r"open_samples\('.*a.txt'\) returned int, which has no __len__",
        ),
        (OPENING.replace("Pages(path)", "[7]"), "1", r"--data = .*a.txt: a sample is int"),
        (
            OPENING.replace("Pages(path)", "open('none')"),
            "1",
            r"open_samples\('.*\) failed: FileNot",
        ),
    ],
)
def test_files_that_cannot_be_read_are_named(
    code: Path, tmp_path: Path, opening: str, content: str, problem: str
) -> None:
    _, folder = trained(code, tmp_path, opening=opening)
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(ConfigError, match=problem):
        file_predictions(folder, tmp_path / "a.txt")


def test_the_command_predicts_other_files_once_the_code_is_trusted(
    code: Path, tmp_path: Path
) -> None:
    _, folder = trained(code, tmp_path)
    np.savez(tmp_path / "new.npz", features=features_of())
    out = tmp_path / "p.parquet"
    files = [f"--data={tmp_path / 'new.npz'}", f"--out={out}"]
    arguments = [folder.root, *files, "--checkpoint=last"]
    with pytest.raises(ConfigError, match="--trust-code"):
        predict.main(arguments)
    predict.main([*arguments, "--trust-code", "--batch-size=32"])
    assert parquet.read_table(out)["target"].equals(predictions(folder)["target"])


@pytest.mark.parametrize("kind", ["torchscript", "pt2"])
def test_a_recipe_with_example_inputs_is_exported(code: Path, tmp_path: Path, kind: str) -> None:
    _, folder = trained(code, tmp_path)
    file = export(folder, out=None, endpoint=None, kind=kind, which="last", trusts_code=True)
    loaded = torch.jit.load(file) if kind == "torchscript" else torch.export.load(file).module()
    network = read_saved(folder, "last", trusts_code=True).build()
    inputs = torch.randn(5, 10)
    torch.testing.assert_close(loaded(inputs), network(inputs))
