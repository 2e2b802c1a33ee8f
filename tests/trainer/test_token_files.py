"""Files of tokens of nanoGPT and llm.c: read where they lie, refused in words, and learnt as nanoGPT does."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from test_language_model import run_alone, text_config
from test_loop import kill_after_saves
from training import FORKSERVER, final_weights, metrics, open_folder, same, train_here

from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.attempt.checks import check_data
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.models import Gpt
from trainyard_trainer.data.loading.rows import read_stand_in
from trainyard_trainer.data.loading.shard_rows import ShardRows
from trainyard_trainer.data.sources.tokens import token_files
from trainyard_trainer.data.sources.tokens.token_files import TokenShards
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.tools import predict

VOCABULARY, CONTEXT = 300, 16
MAGIC = {"gpt2": (20240520, 1, "<u2"), "llama3": (20240801, 7, "<u4")}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tokens_of(count: int, seed: int = 0) -> np.ndarray:
    """Tokens of which each follows from the one before it, most of the time."""
    random = np.random.default_rng(seed)
    found = [1]
    for is_free, free in zip(
        random.random(count - 1) < 0.2, random.integers(2, 40, count - 1), strict=True
    ):
        found.append(int(free) if is_free else (found[-1] * 7 + 3) % VOCABULARY)
    return np.array(found)


def content(kind: str, values: np.ndarray, **header: int) -> bytes:
    """Return a file as nanoGPT or llm.c write it; `header` changes a field of the header."""
    if kind == "nanogpt":
        return values.astype("<u2").tobytes()
    magic, version, dtype = MAGIC[kind]
    known = {"version": version, "tokens": len(values)} | header
    begin = np.zeros(256, "<i4")
    begin[:3] = magic, known["version"], known["tokens"]
    return begin.tobytes() + values.astype(dtype).tobytes()


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def shard_config(storage: Path, source: Path, **changes: Any) -> TrainerConfig:
    return text_config(storage, source, **{"train__model__vocab_size": VOCABULARY, **changes})


def opened(storage: Path, source: Path, **changes: Any) -> TokenShards:
    config = shard_config(storage, source, **{"train__global_batch_size": 4, **changes})
    data = open_data(config, open_folder(config))
    check_data(config, data)
    assert isinstance(data, TokenShards)
    return data


def source_of(folder: Path, count: int = 4000) -> Path:
    tokens = tokens_of(count)
    return write(
        folder,
        {"train.bin": content("nanogpt", tokens), "val.bin": content("nanogpt", tokens[:500])},
    )


# Rows.


@pytest.mark.parametrize("kind", ["nanogpt", "gpt2", "llama3"])
def test_rows_are_stretches_of_the_files_where_they_lie(tmp_path: Path, kind: str) -> None:
    first, second, valid = tokens_of(100), tokens_of(70, 1), tokens_of(40, 2)
    source = write(
        tmp_path / "source",
        {
            "fineweb_train_000001.bin": content(kind, first),
            "sub/fineweb_train_000002.bin": content(kind, second),
            "fineweb_val_000000.bin": content(kind, valid),
            "fineweb_test_000000.bin": content(kind, valid),
        },
    )
    data = opened(tmp_path, source, train__model__end_of_text=1)
    assert (data.num_train, data.num_valid) == (6 + 4, 2)
    assert (data.info.train.tokens, data.info.end_of_text) == (170, 1)
    wanted = [
        tokens[start : start + CONTEXT + 1].tolist()
        for tokens in (first, second)
        for start in range(0, len(tokens) - CONTEXT, CONTEXT)
    ]
    for rows in (ShardRows(data, "train"), pickle.loads(pickle.dumps(ShardRows(data, "train")))):
        batch = rows[np.array([7, 0, 5, 9])]
        assert batch["tokens"].tolist() == [wanted[index] for index in (7, 0, 5, 9)]
        assert batch.ids.tolist() == [7, 0, 5, 9]
        assert len(rows) == 10
    assert read_stand_in(data)["tokens"].tolist() == wanted[:2]
    assert not (tmp_path / "small/data/train").exists()


def test_validation_tokens_may_lie_elsewhere_and_names_need_no_split_then(tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"a.bin": content("gpt2", tokens_of(100))})
    valid = write(tmp_path / "other", {"b.bin": content("nanogpt", tokens_of(40))})
    data = opened(tmp_path, source, data__valid_source=str(valid))
    assert (data.num_train, data.num_valid) == (6, 2)


def test_ids_are_checked_once_for_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(tmp_path / "source")
    opened(tmp_path, source)
    with monkeypatch.context() as patch:
        patch.setattr(token_files.TokenFile, "mapped", None)
        opened(tmp_path, source)
    (source / "train.bin").write_bytes(content("nanogpt", np.full(99, VOCABULARY)))
    with pytest.raises(ConfigError, match="token 0 has the id 300"):
        opened(tmp_path, source)


# Refusals.


GOOD = content("nanogpt", tokens_of(100))


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"train.bin": b"", "val.bin": GOOD}, r"train\.bin is empty"),
        ({"train.bin": GOOD + b"x", "val.bin": GOOD}, r"an odd number of bytes, 201: without a h"),
        ({"train.bin": content("gpt2", tokens_of(100), version=2)}, r"of version 2, and only 1 is"),
        ({"train.bin": content("llama3", tokens_of(100), version=1)}, r"version 1, and only 7 is"),
        ({"train.bin": content("gpt2", tokens_of(100), tokens=101)}, r"counts 101 tokens, .*1,226"),
        (
            {"train.bin": content("gpt2", tokens_of(100), tokens=-1)},
            r"damaged: its header counts -1",
        ),
        ({"train.bin": content("gpt2", tokens_of(100))[:90]}, r"ends within its header"),
        ({"train.bin": np.array([20240522, 1], "<i4").tobytes()}, r"an evaluation file of llm\.c"),
        ({"train.bin": GOOD}, r"none of its validation split\. Name one with the word val"),
        ({"val.bin": GOOD}, r"none of its train split"),
        ({"train.bin": GOOD, "x.bin": GOOD, "val.bin": GOOD}, r"x\.bin belongs to no split"),
        (
            {"train.bin": GOOD[:30], "val.bin": GOOD},
            r"no file of its train split has the 17 tokens",
        ),
        (
            {"train.bin": content("gpt2", np.array([*[1] * 50, 300, 301])), "val.bin": GOOD},
            r"train\.bin: token 50 has the id 300, and the model knows 300 tokens",
        ),
    ],
)
def test_what_is_no_file_of_tokens_is_refused(
    tmp_path: Path, files: dict[str, bytes], problem: str
) -> None:
    source = write(tmp_path / "source", {"val.bin": GOOD, **files} if "odd" in problem else files)
    if "split" not in problem and "val.bin" not in files:
        (source / "val.bin").write_bytes(GOOD)
    with pytest.raises(ConfigError, match=problem):
        opened(tmp_path, source)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"train__model__vocab_size": None}, r"has files of tokens, such as .*train\.bin\. Set"),
        ({"data__loader": "ray"}, r"data\.loader = ray does not read files of tokens"),
        ({"data__source": "stdlib"}, r"stdlib has no files of tokens \(\.bin\)"),
    ],
)
def test_what_does_not_fit_files_of_tokens_is_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        opened(tmp_path, source_of(tmp_path / "source"), **changes)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (
            {"vocab_size": 10, "end_of_text": 10},
            "end_of_text = 10 is no token of a vocab_size of 10",
        ),
        ({"end_of_text": 1}, "it needs vocab_size, and no tokenizer"),
        ({"tokenizer": "/t", "end_of_text": 1}, "it needs vocab_size, and no tokenizer"),
        (
            {"tokenizer": "gs://bucket/t"},
            "is neither a folder nor s3://bucket/prefix nor hf://org/name",
        ),
    ],
)
def test_settings_of_tokens_that_exclude_each_other_are_refused(
    model: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        Gpt.model_validate({"layers": 1, "heads": 1, "width": 8, "context_length": 4, **model})


# Training.


@pytest.mark.ci
def test_a_run_on_files_of_tokens_has_a_perplexity_and_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = shard_config(tmp_path, source_of(tmp_path / "source"), train__epochs=2)
    process = FORKSERVER.Process(target=run_alone, args=(config,))
    process.start()
    process.join()
    assert process.exitcode == 0
    folder, last = open_folder(config), metrics(config, "epoch")[-1]
    page = folder.read(folder.report).decode()
    assert "validation perplexity" in page
    assert f"{math.exp(last['val_loss']):.4g}" in page
    assert "<pre>" not in page
    assert json.loads(folder.read(folder.model_facts))["tokens"]["vocab_size"] == VOCABULARY
    with pytest.raises(ConfigError, match="has learnt files of tokens without a tokenizer"):
        predict.main([folder.root, "--prompt", "a"])


@pytest.mark.ci
def test_a_run_on_files_of_tokens_that_was_killed_has_the_weights_of_one_that_was_not(
    tmp_path: Path,
) -> None:
    source = source_of(tmp_path / "source", 20_000)
    changes = {
        "train__epochs": 2,
        "train__global_batch_size": 16,
        "train__model__dropout": 0.1,
        "train__model__end_of_text": 1,
        "checkpoint__every_samples": 64,
        "checkpoint__keep": 99,
    }
    whole = shard_config(tmp_path / "whole", source, **changes)
    cut = shard_config(tmp_path / "cut", source, **changes)
    assert train_here(whole).resumed_from is None
    newest = kill_after_saves(cut, 3, attempt=1)
    start = train_here(cut, attempt=2).resumed_from
    assert start is not None
    assert start >= newest
    assert same(final_weights(cut), final_weights(whole))
