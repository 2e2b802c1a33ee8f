"""The predictions of a user's recipe for the samples of its own data set, or for those of other files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet
from torch import Tensor

from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.config.trainer_config import OwnRecipeConfig
from trainyard_trainer.data.loading.batch import Batch, BatchRequest
from trainyard_trainer.data.loading.user_dataset import (
    SplitName,
    UserDataset,
    UserRows,
    UserSamples,
    require_map_style,
    require_sample,
    seed_generators,
)
from trainyard_trainer.data.sources.rows.find_rows import TableSplit, open_all_rows
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.networks import model_for
from trainyard_trainer.recipes.recipe import Recipe, collate_of
from trainyard_trainer.recipes.saved_model import Saved
from trainyard_trainer.recipes.trial import columns_of
from trainyard_trainer.run_files.names import RECORD
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.terminal import Bar, table_text
from trainyard_trainer.user_import import user_errors

SHOWN = 20
"""The largest number of samples whose predictions are printed as a table."""

KEYS = ("--data", "--endpoint")
"""What names the files and their S3 server, for messages."""

Read = Callable[[np.ndarray], Batch]
"""Returns the batch of the samples with these numbers."""


def predict_split(
    folder: RunFolder, saved: Saved, split: SplitName, *, batch_size: int, device: torch.device
) -> pa.Table:
    """Return the predictions for a split as a table: `id`, the sample's number, and the recipe's columns.

    Raises ConfigError if the recipe has no predictions, or if the run is not one of a user's recipe.
    """
    recipe = saved.recipe
    config = _config_of(folder, saved, "--split is")
    data = open_data(config, folder)
    assert isinstance(data, UserDataset)
    rows = UserRows(data, split, seed=config.train.seed, collate=collate_of(recipe))

    def read(indices: np.ndarray) -> Batch:
        return rows[BatchRequest(indices, 0)]

    return _predict(saved, len(rows), read, batch_size=batch_size, device=device)


def predict_files(
    folder: RunFolder,
    saved: Saved,
    path: str,
    *,
    endpoint: str | None,
    batch_size: int,
    device: torch.device,
) -> pa.Table:
    """Return the predictions for all samples of other files as a table, as `predict_split` does.

    The files are opened by the recipe's `open_samples`, or else read as a table. Raises TrainerError.
    """
    config = _config_of(folder, saved, "--data with --trust-code is")
    recipe = saved.recipe
    samples = _open_files(recipe, config, path, endpoint)

    def read(indices: np.ndarray) -> Batch:
        rows = _read_samples(samples, path, indices.tolist(), config.train.seed)
        with user_errors(f"--data = {path}: collate of the samples {indices[0]} to {indices[-1]}"):
            return Batch(recipe.collate(rows), torch.from_numpy(indices))

    return _predict(saved, len(samples), read, batch_size=batch_size, device=device)


def _open_files(
    recipe: Recipe[Any], config: OwnRecipeConfig, path: str, endpoint: str | None
) -> UserSamples:
    """Open the samples of files. Raises ConfigError if neither the recipe nor a table has any."""
    opened_by = f"train.recipe = {config.train.recipe}: open_samples({path!r})"
    with user_errors(opened_by):
        samples = recipe.open_samples(path)
    if samples is None:
        try:
            return open_all_rows(
                path,
                endpoint,
                keys=KEYS,
                columns=config.data.columns,
                memory_bytes=config.data.memory_bytes,
            )
        except ConfigError as error:
            raise ConfigError(
                f"{error}\n       For files that are no table, define open_samples(self, path) in the recipe."
            ) from None
    require_map_style(samples, opened_by)
    if not len(samples):
        raise ConfigError(f"--data = {path} has no samples: {opened_by} returned none.")
    return samples


def _read_samples(
    samples: UserSamples, path: str, indices: list[int], seed: int
) -> list[Mapping[str, Any]]:
    """Read samples of files: random changes in them follow from the seed and the sample's number."""
    if isinstance(samples, TableSplit):
        return list(samples.__getitems__(indices))
    rows = []
    for index in indices:
        seed_generators(seed, 0, index)
        with user_errors(f"--data = {path}: reading sample {index}"):
            rows.append(samples[index])
        require_sample(rows[-1], f"--data = {path}")
    return rows


def _predict(
    saved: Saved, count: int, read: Read, *, batch_size: int, device: torch.device
) -> pa.Table:
    """Return the predictions for so many samples. Raises ConfigError if the recipe has none."""
    recipe = saved.recipe
    model: Any = model_for(recipe, saved.build().to(device), lambda module: module)
    tables = []
    with torch.inference_mode(), Bar("samples", count) as bar:
        for indices in _parts(count, batch_size):
            batch = read(indices).to(device)
            where = f"predict, on a batch with {columns_of(batch)}"
            with user_errors(f"train.recipe = {saved.facts['recipe']}: {where}"):
                found = recipe.predict(model, batch)
            tables.append(_table_of(recipe, batch, found))
            bar.advance(len(batch))
    return pa.concat_tables(tables)


def _config_of(folder: RunFolder, saved: Saved, option: str) -> OwnRecipeConfig:
    """Return the config of a run. `option` says in the message what is for recipes of the user."""
    document = json.loads(folder.read(folder.run))
    if ":" not in document["train"]["recipe"]:
        raise ConfigError(
            f"{saved.facts['run']} is a run of train.recipe = {saved.facts['recipe']}: {option} for runs "
            "with a recipe of your own."
        )
    document.pop(RECORD, None)
    return OwnRecipeConfig.model_validate_json(json.dumps(document))


def _parts(count: int, size: int) -> Iterator[np.ndarray]:
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count))


def _table_of(recipe: Recipe[Any], batch: Batch, found: object) -> pa.Table:
    """Return the predictions of a batch as a table. Raises ConfigError unless each sample has one."""
    is_valid = isinstance(found, Mapping) and all(
        isinstance(value, Tensor) and value.dim() > 0 and len(value) == len(batch)
        for value in found.values()
    )
    if not isinstance(found, Mapping) or not is_valid:
        raise ConfigError(
            f"{recipe.title()}.predict has to return a mapping of names to tensors with {len(batch)} rows, "
            f"one for each sample. It returned {_described(found)}."
        )
    columns = {"id": pa.array(batch.ids.cpu().numpy())}
    for name, value in found.items():
        columns[name] = _column(value.detach().cpu())
    return pa.table(columns)


def _column(value: Tensor) -> pa.Array:
    """Return a column of numbers, or of lists of fixed size for each further axis."""
    array = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    column = pa.array(array.reshape(-1))
    for size in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def _described(found: object) -> str:
    if not isinstance(found, Mapping):
        return type(found).__name__
    return ", ".join(
        f"{name} {tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__}"
        for name, value in found.items()
    )


def write_table(table: pa.Table, file: Path) -> None:
    """Write predictions to a file of Parquet or JSON lines. Raises ConfigError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        match file.suffix:
            case ".parquet":
                parquet.write_table(table, file)
            case ".jsonl":
                file.write_text("".join(f"{json.dumps(row)}\n" for row in table.to_pylist()))
            case _:
                raise ConfigError(f"--out = {file}: has to end in .parquet or .jsonl")
    except OSError as error:
        raise ConfigError(f"--out = {file} cannot be written: {error.strerror or error}") from None


def print_table(table: pa.Table, *, as_json: bool) -> None:
    """Print all predictions as JSON, or the first ones as a table."""
    if as_json:
        print(json.dumps(table.to_pylist(), indent=2))
        return
    rows = table.slice(0, SHOWN).to_pylist()
    print(table_text(table.column_names, [tuple(map(_cell, row.values())) for row in rows]))
    if len(table) > SHOWN:
        print(f"and {len(table) - SHOWN:,} more: --out FILE.parquet writes all")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"[{', '.join(map(_cell, value))}]" if isinstance(value, list) else str(value)
