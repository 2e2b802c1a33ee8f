"""Text as a stream of tokens of a tokenizer: rows, resuming, refusals, and a run that learns them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from s3_server import Bucket
from test_language_model import WORDS, run_alone, text_config
from test_loop import kill_after_saves
from training import FORKSERVER, final_weights, metrics, open_folder, same, train_here

pytest.importorskip("transformers")

from tests.support.tiny_models import make_tokenizer, make_tokenizer_folder
from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.attempt.checks import check_data
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.loading.local_copy import LocalCopy
from trainyard_trainer.data.preparation.tokens import prepare_stream as preparation
from trainyard_trainer.data.preparation.tokens import token_chunks
from trainyard_trainer.data.preparation.tokens.prepare_stream import Windows
from trainyard_trainer.data.prepared import Prepared, TokenStreamInfo
from trainyard_trainer.data.sources.tokens import text_pieces
from trainyard_trainer.data.sources.tokens.text_pieces import cut_of
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.language_model.codec import codec_of
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem
from trainyard_trainer.tools import predict
from trainyard_trainer.tools.data import main as inspect_data

CONTEXT = 16


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("t") / "tokenizer", vocab_size=400)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of sentences, with indented lines and characters of several bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    for number in range(2):
        lines = [
            f"{' ' * (place % 3)}{' '.join(random.choice([*WORDS, 'größer', '你好'], 7))}.\n"
            for place in range(300)
        ]
        (folder / f"{number}.txt").write_text("".join(lines))
    return folder


def token_config(storage: Path, source: Path, tokenizer: Path, **changes: Any) -> TrainerConfig:
    return text_config(storage, source, **{"train__model__tokenizer": str(tokenizer), **changes})


def prepared(storage: Path, source: Path, tokenizer: Path, **changes: Any) -> Prepared:
    config = token_config(storage, source, tokenizer, **changes)
    data = open_data(config, open_folder(config))
    assert isinstance(data, Prepared)
    check_data(config, data)
    return data


def rows_of(data: Prepared, split: str) -> list[tuple[int, ...]]:
    part = getattr(data, split)
    tokens = LocalCopy(data, part)[np.arange(part.count)]["tokens"].tolist()
    return sorted(map(tuple, tokens))


# Rows.


@pytest.mark.parametrize("piece_bytes", [2**18, pytest.param(200, marks=pytest.mark.ci)])
def test_rows_are_those_of_all_tokens_with_the_end_of_text_behind_each_document(
    tmp_path: Path,
    corpus: Path,
    tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    piece_bytes: int,
) -> None:
    monkeypatch.setattr(text_pieces, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(token_chunks, "CHUNK_BYTES", 4 * piece_bytes)
    data = prepared(tmp_path, corpus, tokenizer, data__valid_source=str(corpus / "1.txt"))
    info, own = data.info, make_tokenizer(400)
    assert isinstance(info, TokenStreamInfo)
    assert (info.vocab_size, info.end_of_text) == (len(own), own.eos_token_id)
    files = {"train": sorted(corpus.iterdir()), "valid": [corpus / "1.txt"]}
    for split, paths in files.items():
        texts = [path.read_text() for path in paths]
        stream = [token for text in texts for token in [*own(text).input_ids, own.eos_token_id]]
        starts = range(0, len(stream) - CONTEXT, CONTEXT)
        assert rows_of(data, split) == sorted(
            tuple(stream[start : start + CONTEXT + 1]) for start in starts
        )
        counts = getattr(info, split)
        assert (counts.tokens, counts.documents) == (len(stream), len(texts))
        assert counts.bytes == sum(path.stat().st_size for path in paths)


@pytest.mark.parametrize("indent", ["", "    "])
def test_the_end_of_each_file_is_for_validation_and_begins_with_a_line(
    tmp_path: Path, corpus: Path, tokenizer: Path, indent: str
) -> None:
    source = tmp_path / "indented"
    source.mkdir()
    for path in corpus.iterdir():
        lines = path.read_text().splitlines()
        (source / path.name).write_text("".join(f"{indent}{line}\n" for line in lines))
    corpus = source
    data = prepared(tmp_path, corpus, tokenizer, data__valid_share=0.3)
    assert isinstance(data.info, TokenStreamInfo)
    train, valid = data.info.train, data.info.valid
    size = sum(path.stat().st_size for path in corpus.iterdir())
    assert train.bytes + valid.bytes == size
    assert valid.bytes == pytest.approx(0.3 * size, abs=200)
    own = make_tokenizer(400)
    heads = {own.decode(row[:4]).strip() for row in rows_of(data, "valid")}
    lines = [line for path in corpus.iterdir() for line in path.read_text().splitlines()]
    assert any(line.strip().startswith(head) for head in heads if head for line in lines)


def test_text_and_run_may_lie_in_a_bucket(
    bucket: Bucket, tmp_path: Path, corpus: Path, tokenizer: Path
) -> None:
    text, runs = f"{bucket.path}/token-text", f"{bucket.path}/token-runs"
    filesystem, root = open_filesystem(text, bucket.endpoint)
    for path in corpus.iterdir():
        with filesystem.open_output_stream(f"{root}/{path.name}") as stream:
            stream.write(path.read_bytes())
    config = token_config(tmp_path, Path("stdlib"), tokenizer, data__source=text)
    storage = config.storage.model_copy(update={"path": runs, "endpoint": bucket.endpoint})
    config = config.model_copy(update={"storage": storage})
    folder = RunFolder.open(runs, config.name, bucket.endpoint)
    data = open_data(config, folder)
    assert isinstance(data, Prepared)
    local = prepared(tmp_path / "local", corpus, tokenizer)
    for split in ("train", "valid"):
        assert rows_of(data, split) == rows_of(local, split)
    recipe_of(config, data.info).prepare(folder, print)
    codec = codec_of(folder, config.train.model)
    assert codec.decode(codec.encode("größer")) == "größer".encode()


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"one\ntwo", 4),
        (b"one\ntwo\n  three", 4),
        (b" one\n two", 5),
        (b"one two", 6),
        ("one ää".encode(), 6),
        (b"\x80" * 9, 5),
    ],
)
def test_text_is_cut_before_a_line_or_else_before_a_character(data: bytes, place: int) -> None:
    assert cut_of(data) == place


@pytest.mark.parametrize("sizes", [[10], [3, 4, 3], [1] * 10, [0, 9, 0, 1]])
def test_windows_reach_over_the_ends_of_arrays(sizes: list[int]) -> None:
    parts = np.split(np.arange(10, dtype=np.int32), np.cumsum(sizes)[:-1])
    windows = Windows(parts, 3)
    assert len(windows) == 3
    assert windows[np.array([2, 0, 1])].tolist() == [[6, 7, 8, 9], [0, 1, 2, 3], [3, 4, 5, 6]]


class Killed(BaseException):
    """Ends a preparation as a kill would: nothing catches it."""


@pytest.mark.parametrize(
    "last", ["train-00000.json", "train-00002.tokens", "part-00000.parquet", "dataset.json"]
)
def test_a_preparation_that_was_killed_ends_with_the_same_bytes(
    tmp_path: Path, corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    monkeypatch.setattr(text_pieces, "PIECE_BYTES", 1000)
    monkeypatch.setattr(token_chunks, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(preparation, "FILE_BYTES", 8000)
    write = RunFolder.write

    def write_until_killed(self: RunFolder, path: str, data: str | bytes) -> None:
        if path.endswith(last):
            raise Killed
        write(self, path, data)

    prepared(tmp_path / "whole", corpus, tokenizer)
    with patch.object(RunFolder, "write", write_until_killed), pytest.raises(Killed):
        prepared(tmp_path / "cut", corpus, tokenizer)
    prepared(tmp_path / "cut", corpus, tokenizer)
    whole, cut = (
        {
            file.relative_to(tmp_path / name): file.read_bytes()
            for file in (tmp_path / name).rglob("*")
            if file.is_file()
        }
        for name in ("whole", "cut")
    )
    assert len(whole) > 3
    assert cut == whole


def test_prepared_tokens_can_be_looked_at(
    tmp_path: Path, corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = prepared(tmp_path, corpus, tokenizer)
    assert inspect_data(["inspect", data.path]) == 0
    shown = capsys.readouterr().out
    assert f"rows of {CONTEXT + 1} tokens" in shown
    assert any(f"{word} " in shown.rpartition("samples")[2] for word in WORDS)
    assert inspect_data(["inspect", data.path, "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert known["samples"] == {"train": data.num_train, "valid": data.num_valid}
    assert known["kind"] == "prepared tokens"


# Refusals.


@pytest.mark.parametrize(
    ("content", "changes", "problem"),
    [
        (b"abc" * 300 + b"\xff", {}, r"a\.txt is not UTF-8: byte 900 begins no character"),
        (b"abc def\n" * 4, {}, r"its (train|valid) split has \d+ tokens, and a row takes 17"),
        (b"abc", {"train__model__tokenizer": "/none"}, r"tokenizer = /none: there is no such fol"),
    ],
)
def test_what_cannot_be_tokenised_is_refused(
    tmp_path: Path, tokenizer: Path, content: bytes, changes: dict[str, Any], problem: str
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        prepared(tmp_path, source, tokenizer, **changes)


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path: Path, corpus: Path) -> None:
    own = make_tokenizer(400)
    own.eos_token = None
    own.save_pretrained(tmp_path / "t")
    with pytest.raises(ConfigError, match="has no token that ends a text"):
        prepared(tmp_path, corpus, tmp_path / "t")


def test_prepared_tokens_fit_only_their_tokenizer_context_and_recipe(
    tmp_path: Path, corpus: Path, tokenizer: Path
) -> None:
    data = prepared(tmp_path / "first", corpus, tokenizer)
    same_again = prepared(tmp_path / "again", Path(data.path), tokenizer)
    assert same_again.info == data.info
    other = make_tokenizer_folder(tmp_path / "other", vocab_size=500)
    source = Path(data.path)
    with pytest.raises(ConfigError, match="is not the tokenizer of the tokens of"):
        prepared(tmp_path / "a", source, other)
    with pytest.raises(ConfigError, match=r"context_length = 8, but .* is prepared for 16"):
        prepared(tmp_path / "b", source, tokenizer, train__model__context_length=8)
    of_bytes = text_config(tmp_path / "c", source)
    with pytest.raises(ConfigError, match="holds tokens of text, which only recipe language_model"):
        open_data(of_bytes, open_folder(of_bytes))
    bytes_of = text_config(tmp_path / "d", corpus)
    open_data(bytes_of, open_folder(bytes_of))
    with pytest.raises(ConfigError, match=r"holds text, and a run with train\.model\.tokenizer"):
        prepared(tmp_path / "e", Path(open_folder(bytes_of).data), tokenizer)


# A whole run.


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tokenizer: Path) -> TrainerConfig:
    """A run that has succeeded, whose tokenizer was removed afterwards."""
    storage = tmp_path_factory.mktemp("runs")
    shutil.copytree(tokenizer, storage / "tokenizer")
    config = token_config(
        storage,
        corpus,
        storage / "tokenizer",
        train__epochs=4,
        train__global_batch_size=16,
        train__schedule={"name": "constant"},
    )
    process = FORKSERVER.Process(target=run_alone, args=(config,))
    process.start()
    process.join()
    assert process.exitcode == 0
    shutil.rmtree(storage / "tokenizer")
    return config


@pytest.mark.ci
def test_a_run_learns_tokens_and_reports_bits_per_byte(ended: TrainerConfig) -> None:
    folder, last = open_folder(ended), metrics(ended, "epoch")[-1]
    assert last["val_loss"] < 0.7 * math.log(400)
    facts = json.loads(folder.read(folder.model_facts))
    info = facts["tokens"]
    page = folder.read(folder.report).decode()
    bits = last["val_loss"] / math.log(2) * info["valid"]["tokens"] / info["valid"]["bytes"]
    assert f"{bits:.3f}" in page
    assert f"{last['val_loss']:.4f} nats per token" in page
    assert page.count("<pre>") == 6
    assert "next token right" in page


@pytest.mark.ci
def test_a_prompt_is_continued_without_the_original_tokenizer(
    ended: TrainerConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    root = open_folder(ended).root
    for prompt in ("the small", "größer"):
        words = [root, "--prompt", prompt, "--length", "12", "--temperature", "0", "--json"]
        assert predict.main(words) == 0
        text = json.loads(capsys.readouterr().out)["text"]
        assert set(text.replace(".", " ").split()) & {*WORDS, "größer", "你好"}
    with pytest.raises(ConfigError, match="has the token that ends a document"):
        predict.main([root, "--prompt", "a<|im_end|>b"])


@pytest.mark.ci
def test_a_run_on_tokens_that_was_killed_has_the_weights_of_one_that_was_not(
    tmp_path: Path, corpus: Path, tokenizer: Path
) -> None:
    changes = {
        "train__epochs": 3,
        "train__global_batch_size": 16,
        "train__model__dropout": 0.1,
        "checkpoint__every_samples": 48,
        "checkpoint__keep": 99,
    }
    whole = token_config(tmp_path / "whole", corpus, tokenizer, **changes)
    cut = token_config(tmp_path / "cut", corpus, tokenizer, **changes)
    assert train_here(whole).resumed_from is None
    newest = kill_after_saves(cut, 3, attempt=1)
    start = train_here(cut, attempt=2).resumed_from
    assert start is not None
    assert start >= newest
    assert same(final_weights(cut), final_weights(whole))
