"""Trees of XGBoost and LightGBM: their rows, what a run goes on with, what it leaves for others to load."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xgboost
from attempts import Attempts, committed, read_json, read_records, wait_for
from pydantic import ValidationError

from tests.support.settings import set_all
from trainyard_trainer.boosting.attempt import run, with_absolute_path
from trainyard_trainer.boosting.libraries import LIBRARIES
from trainyard_trainer.boosting.rounds import BoostingTask, work
from trainyard_trainer.boosting.table import check_shares, prepare, read_share
from trainyard_trainer.boosting.table_files import uniform
from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
)
from trainyard_trainer.config.trainer_config import BoostingConfig
from trainyard_trainer.engine.outcome import Outcome
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.log import Output
from trainyard_trainer.run_folder.measurements.startup import Startup
from trainyard_trainer.run_folder.ownership.fence import Fence
from trainyard_trainer.tools import checkpoints, export, predict

SOME: dict[str, Any] = {
    "name": "trees",
    "data": {"source": "breast_cancer", "label_column": "diagnosis"},
    "train": {
        "recipe": "gradient_boosting",
        "library": "xgboost",
        "objective": "binary",
        "rounds": 8,
        "max_depth": 3,
        "subsample": 0.8,
        "colsample_bytree": 0.8,
    },
    "checkpoint": {"every_rounds": 3},
    "scaling": {"num_workers": 1, "use_gpu": False, "cpus_per_worker": 1},
}
BOTH = pytest.mark.parametrize("library", ["xgboost", "lightgbm"])


def trees(storage: Path, **changes: Any) -> BoostingConfig:
    """A run of moments; `train__rounds=3` changes one value."""
    document = json.loads(json.dumps(SOME)) | {"storage": {"path": str(storage)}}
    return BoostingConfig.model_validate(set_all(document, changes))


def folder_of(config: BoostingConfig) -> RunFolder:
    return RunFolder.open(config.storage.path, config.name)


def table_of(config: BoostingConfig) -> Any:
    return prepare(config.data, config.train, None, print)


def boost(config: BoostingConfig, attempt: int = 1) -> Outcome:
    """One worker's work in this process, with the files it writes and nothing of Ray."""
    folder = folder_of(config)
    folder.write(f"{folder.lease}/a{attempt}.ended", "")
    folder.create(Fence(folder, attempt).path, "{}")
    task = BoostingTask(
        config=config,
        table=table_of(config),
        attempt=attempt,
        startup=Startup(began=time.time()),
    )
    return work(task, Worker(device=torch.device("cpu")))


def trees_in(config: BoostingConfig) -> bytes:
    """The newest model: the bytes of XGBoost's file, the trees of LightGBM's."""
    checkpoints = Checkpoints(folder_of(config))
    newest = checkpoints.newest()
    assert newest is not None
    file = LIBRARIES[config.train.library].file
    return folder_of(config).read(checkpoints.path(newest.name, file)).split(b"\nparameters:")[0]


def rows_of_trees(config: BoostingConfig) -> list[float]:
    """How many rows each tree of a regression has learnt from, as the library itself counts them."""
    model = trees_in(config)
    if config.train.library == "xgboost":
        nodes = xgboost.Booster(model_file=bytearray(model)).trees_to_dataframe()
        return nodes[nodes["Node"] == 0]["Cover"].tolist()
    return [float(each) for each in re.findall(rb"internal_count=(\d+)", model)]


def write_table(path: Path, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=7)


# Rows.


def houses(folder: Path, files: int = 3, rows: int = 40) -> Path:
    """Files whose column `id` numbers all rows, in the order of their labels."""
    for number in range(files):
        ids = np.arange(number * rows, (number + 1) * rows)
        write_table(
            folder / f"{number}.parquet",
            id=ids,
            big=pa.array([None if one % 5 == 0 else one / 2 for one in ids.tolist()]),
            price=ids * 3.0,
        )
    return folder


def of_houses(source: Path, **changes: Any) -> BoostingConfig:
    keys = {"data__source": f"{source}/", "data__label_column": "price"}
    objective = {"train__objective": "regression", "data__valid_share": 0.25}
    return trees(source.parent / "runs", **keys | objective | changes)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_row_is_one_workers_and_of_one_part(tmp_path: Path, workers: int) -> None:
    table = table_of(of_houses(houses(tmp_path / "houses")))
    parts = {}
    for name, part in (("train", table.train), ("valid", table.valid)):
        shares = [read_share(table, part, rank, workers) for rank in range(workers)]
        sizes = [len(share.labels) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == part.rows
        ids = np.concatenate([share.features[:, 0] for share in shares])
        labels = np.concatenate([share.labels for share in shares])
        assert (labels == ids * 3).all()
        parts[name] = set(ids.tolist())
    assert parts["train"] | parts["valid"] == set(range(120))
    assert not parts["train"] & parts["valid"]


def test_what_is_missing_stays_missing(tmp_path: Path) -> None:
    table = table_of(of_houses(houses(tmp_path / "houses")))
    rows = read_share(table, table.train, 0, 1)
    assert rows.features.dtype == np.float32
    assert (np.isnan(rows.features[:, 1]) == (rows.features[:, 0] % 5 == 0)).all()


def test_rows_for_validation_follow_from_the_seed(tmp_path: Path) -> None:
    source = houses(tmp_path / "houses")

    def kept(seed: int) -> set[float]:
        table = table_of(of_houses(source, train__seed=seed))
        return set(read_share(table, table.valid, 0, 1).features[:, 0].tolist())

    assert kept(1) == kept(1) != kept(2)


def test_draws_are_even_and_do_not_depend_on_each_other() -> None:
    drawn = uniform(3, np.arange(100_000))
    counts, _ = np.histogram(drawn, bins=10, range=(0, 1))
    assert abs(counts - 10_000).max() < 500
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.02
    assert (uniform(3, np.arange(500, 600)) == drawn[500:600]).all()


def test_parts_may_be_files_of_their_own(tmp_path: Path) -> None:
    source = tmp_path / "houses"
    write_table(source / "train" / "0.parquet", id=[1, 2, 3], price=[1.0, 2.0, 3.0])
    write_table(source / "test" / "0.parquet", id=[4], price=[4.0])
    table = table_of(of_houses(source))
    assert (table.train.rows, table.valid.rows) == (3, 1)
    write_table(tmp_path / "new.parquet", id=[5, 6], price=[5.0, 6.0])
    table = table_of(of_houses(source, data__valid_source=str(tmp_path / "new.parquet")))
    assert (table.train.rows, table.valid.rows) == (4, 2)


def test_classes_are_the_labels_of_training_in_order(tmp_path: Path) -> None:
    names = ["pear", "apple", "fig"] * 10
    write_table(
        tmp_path / "fruit.parquet",
        weight=list(range(30)),
        label=pa.array(names).dictionary_encode(),
    )
    config = trees(
        tmp_path,
        data={"source": str(tmp_path / "fruit.parquet")},
        train__objective="multiclass",
    )
    table = table_of(config)
    assert table.classes == ("apple", "fig", "pear")
    rows = read_share(table, table.train, 0, 1)
    told = [table.classes[int(label)] for label in rows.labels]
    assert told == [names[int(weight)] for weight in rows.features[:, 0]]


@pytest.mark.parametrize(
    ("columns", "changes", "message"),
    [
        ({"a": ["x"] * 9, "b": [1] * 9, "label": [0, 1, 2] * 3}, {}, r"not numeric: a \(string\)"),
        ({"a": [1] * 9, "label": [0, 1, 2] * 3}, {"train__objective": "binary"}, "has 3 different"),
        ({"a": [1] * 9, "label": [1] * 9}, {}, "has only one distinct label, 1"),
        (
            {"a": [1] * 9, "label": [0, 1, None] * 3},
            {},
            r"0.parquet: row [258] \(from 0\) has no label",
        ),
        ({"a": [1] * 9, "lable": [0, 1, 2] * 3}, {}, "no column label.* Did you mean lable"),
        ({"a": [1] * 9, "label": ["x"] * 9}, {"train__objective": "regression"}, "learns numbers"),
        ({"a b": [1] * 9, "a_b": [1] * 9, "label": [0, 1, 2] * 3}, {}, "differ only in spaces"),
        ({"label": [0, 1, 2] * 3}, {}, "no columns except the label column"),
    ],
)
def test_rows_that_cannot_be_learnt_from_are_refused(
    tmp_path: Path, columns: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    write_table(tmp_path / "0.parquet", **columns)
    data = {"source": str(tmp_path / "0.parquet")}
    config = trees(tmp_path, **{"data": data, "train__objective": "multiclass"} | changes)
    with pytest.raises(ConfigError, match=message):
        table_of(config)


def test_a_worker_without_rows_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "houses"
    write_table(source / "train" / "0.parquet", id=[1, 2, 3], price=[1.0, 2.0, 3.0])
    write_table(source / "valid" / "0.parquet", id=[4], price=[4.0])
    with pytest.raises(ConfigError, match="1 validation rows, but each of 2 workers"):
        check_shares(table_of(of_houses(source)), 2)


# Config.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__epochs": 3}, "Extra inputs"),
        ({"data__loader": "ray"}, "Extra inputs"),
        ({"data__source": "digits"}, "is for train.recipe = image_classification"),
        ({"data__feature_columns": ["diagnosis"]}, "which is data.label_column"),
        ({"data__feature_columns": ["a", "a"]}, "has a twice"),
        (
            {"train__objective": "regression", "checkpoint__best": "val_accuracy"},
            "val_accuracy is no metric of the recipe: use val_rmse or val_loss",
        ),
    ],
)
def test_sections_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        trees(tmp_path, **changes)


# Rounds.


@BOTH
@pytest.mark.parametrize("objective", ["binary", "multiclass", "regression"])
def test_a_run_that_goes_on_grows_the_same_trees(
    tmp_path: Path, library: str, objective: str
) -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(size=(300, 4))
    label = {
        "binary": values[:, 0] > 0,
        "multiclass": np.digitize(values[:, 0], [-0.5, 0.5]),
        "regression": values[:, 0] * values[:, 1],
    }[objective]
    columns = {f"x{number}": values[:, number] for number in range(4)}
    write_table(tmp_path / "table.parquet", **columns, label=label)
    keys = {
        "data": {"source": str(tmp_path / "table.parquet")},
        "train__library": library,
        "train__objective": objective,
    }
    whole, parts = trees(tmp_path, **keys, name="whole"), trees(tmp_path, **keys, name="parts")
    boost(whole)
    boost(trees(tmp_path, **keys, name="parts", train__rounds=4))
    outcome = boost(parts, attempt=2)
    assert outcome.resumed_from is not None
    assert outcome.trained.epoch == 8
    told = [
        [
            (line["epoch"], line["loss"], line["val_loss"])
            for line in read_records(config, "metrics.jsonl")
        ]
        for config in (whole, parts)
    ]
    assert trees_in(parts) == trees_in(whole)
    assert told[0] == told[1]
    assert [epoch for epoch, _, _ in told[1]] == list(range(1, 9))


@BOTH
def test_each_round_draws_rows_of_its_own(tmp_path: Path, library: str) -> None:
    config = of_houses(houses(tmp_path / "data"), train__library=library, train__subsample=0.5)
    boost(config)
    rows = table_of(config).train.rows
    drawn = rows_of_trees(config)
    assert all(0.25 * rows < each < 0.75 * rows for each in drawn)
    assert len(set(drawn)) > 1


@BOTH
def test_a_run_that_is_asked_to_stop_saves_and_leaves(tmp_path: Path, library: str) -> None:
    config = trees(tmp_path, train__library=library, train__rounds=100_000)
    folder = folder_of(config)
    folder.write(folder.stop(1), "")
    outcome = boost(config)
    assert outcome.is_stopped
    assert 0 < outcome.trained.epoch < 100_000
    newest = Checkpoints(folder).newest()
    assert newest is not None
    assert newest.trained.epoch == outcome.trained.epoch


def test_checkpoints_come_and_go_by_the_rule(tmp_path: Path) -> None:
    config = trees(tmp_path, train__rounds=10, checkpoint__keep=1, checkpoint__best="val_loss")
    boost(config)
    kept = {checkpoint.trained.epoch for checkpoint in Checkpoints(folder_of(config)).committed()}
    assert 10 in kept
    assert kept <= {3, 6, 9, 10}
    assert len(kept) <= 2


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    labels = [1e38, -1e38] * 50
    write_table(tmp_path / "wild.parquet", a=list(range(100)), label=labels)
    keys = {"data": {"source": str(tmp_path / "wild.parquet")}, "train__objective": "regression"}
    outcome = boost(trees(tmp_path, **keys, train__learning_rate=1000.0))
    assert "in round" in (outcome.diverged or "")
    assert not outcome.is_stopped


# Whole runs, without Ray.


def alone(config: BoostingConfig) -> dict[str, Any]:
    """The summary of an attempt in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        with Output() as output:
            run(config, output, {}, without_ray=True)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return read_json(config, "summary.json")


@BOTH
def test_others_load_the_model_and_find_what_the_run_has_told(tmp_path: Path, library: str) -> None:
    config = with_absolute_path(trees(tmp_path, train__library=library))
    summary = alone(config)
    facts = read_json(config, "model.json")
    table = table_of(config)
    valid = read_share(table, table.valid, 0, 1)
    model = str(tmp_path / "trees" / facts["file"])
    assert summary["model"] == model
    if library == "xgboost":
        import xgboost

        names = facts["images"]["feature_names"]
        rows = xgboost.DMatrix(valid.features, feature_names=names)
        told = xgboost.Booster(model_file=model).predict(rows)
    else:
        import lightgbm

        told = np.asarray(lightgbm.Booster(model_file=model).predict(valid.features))
    right = np.where(valid.labels == 1, told, 1 - told)
    assert summary["val_loss"] == pytest.approx(-np.log(right).mean(), abs=1e-5)
    assert summary["val_accuracy"] == pytest.approx((right > 0.5).mean(), abs=1e-5)
    assert summary["val_accuracy"] > 0.9
    assert facts["images"]["classes"] == ["benign", "malignant"]


def test_a_regression_tells_the_root_of_its_error_and_shows_it(tmp_path: Path) -> None:
    config = of_houses(houses(tmp_path / "houses"))
    summary = alone(config)
    assert "val_accuracy" not in summary
    assert summary["val_rmse"] == pytest.approx(math.sqrt(summary["val_loss"]), rel=1e-4)
    assert read_json(config, "progress.json")["val_rmse"] == summary["val_rmse"]
    report = folder_of(config).read(folder_of(config).report).decode()
    assert "validation RMSE" in report
    assert 'aria-label="share of the gain of all splits"' in report


def test_a_run_that_has_ended_is_known_and_goes_on_with_more_rounds(tmp_path: Path) -> None:
    config = trees(tmp_path, train__rounds=3)
    alone(config)
    again = alone(config)
    assert (again["attempts"], again["rounds"]) == (2, 3)
    assert len(read_records(config, "metrics.jsonl")) == 3
    more = alone(trees(tmp_path, train__rounds=5))
    assert (more["attempts"], more["rounds"]) == (3, 5)
    with pytest.raises(ConfigError, match=r"train\.rounds: 5 -> 3"):
        alone(config)
    with pytest.raises(ConfigError, match=r"train\.max_depth: 3 -> 4"):
        alone(trees(tmp_path, train__rounds=5, train__max_depth=4))


def test_files_that_have_changed_since_are_refused(tmp_path: Path) -> None:
    config = of_houses(houses(tmp_path / "houses"))
    alone(config)
    houses(tmp_path / "houses", files=4)
    with pytest.raises(ConfigError, match="are not those with which checkpoint"):
        alone(config)


def test_tools_for_networks_refuse_trees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone(trees(tmp_path, train__rounds=3))
    run_and_storage = ["trees", "--storage", str(tmp_path)]
    for command, more in ((predict.main, ["--prompt", "x"]), (export.main, [])):
        with pytest.raises(ConfigError, match="xgboost itself loads them"):
            command([*run_and_storage, *more])
        with pytest.raises(ConfigError, match="xgboost itself loads them"):
            command([*run_and_storage, *more, "--checkpoint", "last"])
    capsys.readouterr()
    assert checkpoints.main(["ls", *run_and_storage, "--json"]) == 0
    (newest,) = json.loads(capsys.readouterr().out)
    assert newest["epoch"] == 3
    assert set(newest["marks"]) == {"newest", "best", "delivered"}


# On Ray.


@pytest.mark.parametrize(
    "library",
    [
        pytest.param("xgboost", marks=pytest.mark.ci),
        pytest.param("lightgbm", marks=pytest.mark.slow),
    ],
)
def test_two_workers_grow_trees_over_the_rows_of_both(attempts: Attempts, library: str) -> None:
    keys = {"train__library": library, "train__subsample": 1.0, "scaling__num_workers": 2}
    config = of_houses(houses(attempts.storage / "houses"), **keys)
    attempts.finish(config)
    summary = read_json(config, "summary.json")
    assert (summary["outcome"], summary["workers"]) == ("succeeded", 2)
    assert len(read_json(config, "workers.json")["workers"]) == 2
    lines = read_records(config, "metrics.jsonl")
    assert [line["epoch"] for line in lines] == list(range(1, 9))
    assert lines[-1]["val_loss"] < lines[0]["val_loss"]
    assert rows_of_trees(config) == [table_of(config).train.rows] * 8


@pytest.mark.slow
@BOTH
def test_a_killed_worker_leaves_the_trees_that_there_would_have_been(
    attempts: Attempts, library: str
) -> None:
    keys = {"train__library": library, "train__rounds": 300, "scaling__num_workers": 2}
    whole = trees(attempts.storage, **keys, name="whole")
    struck = trees(attempts.storage, **keys, name="struck")
    attempts.finish(whole)
    process = attempts.start(struck)
    assert wait_for(lambda: committed(struck), 120)
    pid = read_json(struck, "workers.json")["workers"][1]["process"]
    os.kill(pid, signal.SIGKILL)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert len(read_records(struck, "failures.jsonl")) >= 1
    assert trees_in(struck) == trees_in(whole)
