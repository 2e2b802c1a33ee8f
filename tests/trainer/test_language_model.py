"""A run that learns text: its rows, what its network sees, and that all else is as in any other run."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from attempts import Attempts, committed, lines, ray_config, read_json
from plain_torch import asked
from pydantic import ValidationError
from s3_server import Bucket
from test_fsdp2 import final_weights as weights_of_any
from test_fsdp2 import losses, losses_of_steps
from test_loop import kill_after_saves
from torch import nn
from training import (
    FORKSERVER,
    final_weights,
    metrics,
    open_folder,
    same,
    small_config,
    step_losses,
    task_of,
    train_here,
)

from trainyard.cli.record_lines import progress_text, summary_text
from trainyard_trainer.attempt import checks
from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.models import Gpt
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.local_copy import LocalCopy
from trainyard_trainer.data.preparation.context import PrepareContext
from trainyard_trainer.data.prepared import Prepared, Split
from trainyard_trainer.data.sources.columns import ImageColumns
from trainyard_trainer.data.sources.images.find import open_source
from trainyard_trainer.data.sources.tokens.byte_rows import SEPARATOR, STDLIB_BYTES, open_text
from trainyard_trainer.data.stored_rows import decode
from trainyard_trainer.engine.learning.learner import Learner
from trainyard_trainer.engine.measuring.speed import speeds_in
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.hardware import peak_flops
from trainyard_trainer.parallel.units import units
from trainyard_trainer.parallel.worker import Worker
from trainyard_trainer.recipes.language_model.codec import prompt_of
from trainyard_trainer.recipes.language_model.generation import continued
from trainyard_trainer.recipes.language_model.model import Memory, Transformer, layout
from trainyard_trainer.recipes.language_model.recipe import (
    Language,
    flops_per_token,
    parameters_of,
)
from trainyard_trainer.recipes.language_model.report import readable, texts
from trainyard_trainer.recipes.saved_model import read_saved
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import Length
from trainyard_trainer.storage import open_filesystem
from trainyard_trainer.tools import predict

CPU = torch.device("cpu")
SMALL = Gpt(layers=2, heads=2, width=32, context_length=16)
WORDS = [
    "the",
    "small",
    "horse",
    "and",
    "old",
    "cow",
    "saw",
    "that",
    "green",
    "bird",
    "was",
    "near",
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As a worker of one CPU has: several would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of sentences of few words, 24 kB in all."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    for number in range(3):
        sentences = [" ".join(random.choice(WORDS, 8)) for _ in range(200)]
        (folder / f"{number}.txt").write_text(".\n".join(sentences))
    return folder


def text_config(storage: Path, source: Path | str, **changes: Any) -> TrainerConfig:
    """A run of seconds on text."""
    train = {
        "recipe": "language_model",
        "model": SMALL.model_dump(),
        "epochs": 1,
        "global_batch_size": 64,
        "optimizer": {"name": "adamw", "learning_rate": 0.003},
    }
    data = {"source": str(source)}
    return small_config(storage, **{"train": train, "data": data, **changes})


# Rows.


def rows_in(data: Prepared, split: Split) -> list[bytes]:
    """The rows of a split, as they lie in its files."""
    table = pq.read_table(list(split.files), filesystem=data.open_filesystem())
    return [row.tobytes() for row in decode(table, data.info)["text"]]


def joined(rows: list[bytes]) -> set[bytes]:
    """What rows say when those that overlap are laid together; no byte may come twice."""
    by_first = {row[0]: row for row in rows}
    begins = by_first.keys() - {row[-1] for row in rows}
    found = set()
    for first in begins:
        text = by_first[first]
        while text[-1] in by_first:
            text += by_first[text[-1]][1:]
        found.add(text)
    return found


def prepared(tmp_path: Path, files: dict[str, bytes], context: int, **data: Any) -> Prepared:
    source = tmp_path / "source"
    for name, content in files.items():
        file = source / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    changes = {f"data__{key}": value for key, value in data.items()}
    config = text_config(tmp_path / "runs", source, train__model__context_length=context, **changes)
    return open_data(config, open_folder(config))


def test_documents_follow_each_other_and_are_cut_into_rows_that_overlap_by_a_byte(
    tmp_path: Path,
) -> None:
    one, two = bytes(range(1, 41)), bytes(range(101, 131))
    data = prepared(tmp_path, {"a.txt": one, "b.txt": two}, 4, valid_share=0.25)
    assert data.info.kind == "text"
    assert data.info.shape == (1, 1, 5)
    train, valid = rows_in(data, data.train), rows_in(data, data.valid)
    assert {len(row) for row in train + valid} == {5}
    # 30 and 23 bytes with a separator each are 13 rows, and 3 bytes that fill none; the ends are 10 and 7.
    assert joined(train) == {one[:30] + b"\0" + two[:22]}
    assert joined(valid) == {one[30:] + b"\0" + two[23:29]}


def test_no_byte_of_validation_is_trained(tmp_path: Path) -> None:
    data = prepared(tmp_path, {"a.txt": bytes(range(1, 201))}, 8)
    trained, tried = (set(b"".join(rows_in(data, part))) for part in (data.train, data.valid))
    assert trained & tried <= {SEPARATOR}
    assert max(trained) < min(tried - {SEPARATOR})


def test_text_files_are_found_by_name_in_all_folders(tmp_path: Path) -> None:
    files = {
        "b/deep/x.txt": b"x" * 40,
        "a.txt": b"a" * 40,
        "c.md": b"c" * 40,
        ".hidden/d.txt": b"d" * 40,
    }
    found = prepared(tmp_path / "1", files, 4)
    assert set(b"".join(rows_in(found, found.train))) == {*b"ax", SEPARATOR}
    found = prepared(tmp_path / "2", files, 4, text_files="*.md")
    assert set(b"".join(rows_in(found, found.train))) <= {*b"c", SEPARATOR}


def test_validation_text_may_lie_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "valid.text").write_bytes(b"v" * 40)
    data = prepared(tmp_path, {"a.txt": b"t" * 40}, 4, valid_source=str(tmp_path / "valid.text"))
    assert set(b"".join(rows_in(data, data.train))) == {*b"t", SEPARATOR}
    assert set(b"".join(rows_in(data, data.valid))) == {*b"v", SEPARATOR}
    assert (data.num_train, data.num_valid) == (10, 10)


def test_text_that_is_too_large_for_memory_has_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"{number}.txt": bytes([number + 1]) * (100 + number) for number in range(20)}
    small = prepared(tmp_path / "small", files, 16)
    monkeypatch.setattr(
        "trainyard_trainer.data.preparation.run_data.PrepareContext",
        partial(PrepareContext, memory_bytes=500),
    )
    large = prepared(tmp_path / "large", files, 16)
    for part in ("train", "valid"):
        assert rows_in(large, getattr(large, part)) == rows_in(small, getattr(small, part))


def test_text_may_lie_in_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    path = f"{bucket.path}/text"
    filesystem, root = open_filesystem(path, bucket.endpoint)
    for name, content in (("b/two.txt", b"b" * 50), ("one.txt", b"a" * 50), ("notes.md", b"n")):
        with filesystem.open_output_stream(f"{root}/{name}") as stream:
            stream.write(content)
    found = open_text(
        path,
        endpoint=bucket.endpoint,
        pattern=None,
        row_bytes=6,
        valid_share=0.2,
        say=lambda line: None,
    )
    with ThreadPoolExecutor(2) as pool:
        rows = found.splits["train"].read(np.arange(16), pool).images
    assert rows[:, 0, 0, :-1].tobytes() == b"b" * 40 + b"\0" + b"a" * 39
    assert str(found.splits["train"].where(9)).endswith("one.txt, byte 4")


def test_images_are_not_looked_for_in_text(corpus: Path) -> None:
    columns = ImageColumns("image", "label")
    for source in (str(corpus), "stdlib"):
        with pytest.raises(ConfigError, match=r"Text is prepared by the runs that train on it"):
            open_source(source, endpoint=None, columns=columns, say=print)


@pytest.mark.parametrize(
    ("files", "data", "problem"),
    [
        ({"a.txt": b"abc" * 20 + b"\0" + b"d" * 20}, {}, "a.txt is no text: byte 60 is 0"),
        ({"a.md": b"a" * 40}, {}, r"files: 1, and none is named \*\.txt\. Say by data\.text_files"),
        ({"a.txt": b"abc"}, {}, "it has 4 bytes, and a row takes 5"),
        ({"a.txt": b"abcdefghijk"}, {}, "for validation has 3 bytes, and a row takes 5"),
    ],
)
def test_what_is_no_text_or_too_little_is_refused(
    tmp_path: Path, files: dict[str, bytes], data: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        prepared(tmp_path, files, 4, **data)


def test_the_standard_library_is_a_mebibyte_of_python(tmp_path: Path) -> None:
    config = text_config(tmp_path, "stdlib", train__model__context_length=128)
    data = open_data(config, open_folder(config))
    assert 0.8 * STDLIB_BYTES < data.num_train / 0.8 * 128 <= STDLIB_BYTES
    assert any(b"import " in row for row in rows_in(data, data.valid))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data__augment": {"flip": True}}, "data.augment means nothing to"),
        ({"data__image_column": "x"}, "data.image_column means nothing to"),
        ({"data__source": "digits"}, "data.source = digits is for train.recipe = image_class"),
        ({"train__label_smoothing": 0.1}, "label_smoothing"),
        ({"train__model__heads": 3}, "use a width of 30 or 33"),
    ],
)
def test_what_means_nothing_to_text_is_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValidationError, match=problem):
        text_config(tmp_path, "stdlib", **changes)


def test_a_model_for_other_rows_or_for_images_is_refused(tmp_path: Path, corpus: Path) -> None:
    text = task_of(text_config(tmp_path, corpus)).data
    with pytest.raises(ConfigError, match=r"context_length = 32, but .* is prepared for 16"):
        Language(SMALL.model_copy(update={"context_length": 32}), text.info).check_fit()
    images = small_config(tmp_path, name="images")
    with pytest.raises(ConfigError, match=r"is text, and train\.recipe = image_classification"):
        checks.check_data(images, text)
    with pytest.raises(ConfigError, match=r"has images, and train\.recipe = language_model"):
        Language(SMALL, task_of(images).data.info).check_fit()


# The network.


def network_of(config: Gpt = SMALL) -> Transformer:
    torch.manual_seed(0)
    network = Transformer(config).eval()
    # Initial weights say hardly anything; these say much.
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(5)
    return network


def row_of(*documents: bytes) -> torch.Tensor:
    return torch.tensor([list(b"\0".join(documents))])


def test_what_stands_in_another_document_changes_nothing() -> None:
    network = network_of()
    with torch.no_grad():
        scores = network(row_of(b"abcde", b"fghij"))[0]
        before = network(row_of(b"ABCDE", b"fghij"))[0]
        after = network(row_of(b"abcde", b"FGHIJ"))[0]
        alone = network(row_of(b"", b"fghij"))[0]
    assert not torch.allclose(before[:5], scores[:5], atol=1e-3)
    assert torch.equal(before[5:], scores[5:])
    assert torch.equal(after[:6], scores[:6])
    # Not even that something stands there: places are counted from a document's own beginning.
    assert torch.allclose(alone, scores[5:], atol=1e-5)


def test_no_byte_sees_what_follows_it() -> None:
    network = network_of()
    with torch.no_grad():
        scores = network(row_of(b"abcdefgh"))[0]
        for place in range(7):
            other = list(b"abcdefgh")
            other[place + 1] = ord("X")
            found = network(torch.tensor([other]))[0]
            assert torch.equal(found[: place + 1], scores[: place + 1])
            assert not torch.allclose(found[place + 1], scores[place + 1], atol=1e-3)


def test_each_byte_has_its_place_in_its_document_and_sees_it_back_to_its_beginning() -> None:
    places, sees = layout(torch.tensor([[7, 7, 0, 7, 7, 0, 0, 7]]))
    assert places.tolist() == [[0, 1, 0, 1, 2, 0, 0, 1]]
    assert sees.sum(dim=2).tolist() == [[1, 2, 1, 2, 3, 1, 1, 2]]


def test_a_network_begins_with_no_opinion() -> None:
    torch.manual_seed(0)
    network = Transformer(Gpt(layers=4, heads=4, width=128, context_length=64))
    rows = torch.randint(1, 256, (4, 65))
    loss = nn.functional.cross_entropy(network(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_blocks_are_what_fsdp2_gathers_one_after_the_other() -> None:
    assert len(list(units(Transformer(SMALL)))) == SMALL.layers


def test_parameters_and_arithmetic_are_counted() -> None:
    model = Gpt(layers=3, heads=2, width=10, context_length=7)
    block = 12 * 10 * 10 + 13 * 10
    count = 256 * 10 + 7 * 10 + 3 * block + 2 * 10
    assert parameters_of(model) == count
    assert flops_per_token(model) == 6 * count + 12 * 3 * 10 * 7


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA A10G", None),
        ("Tesla T4", None),
    ],
)
def test_the_share_of_a_gpus_peak_is_told_where_its_peak_is_known(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    device = torch.device("cuda", 0)
    assert peak_flops(device) == peak
    speeds = speeds_in(Language(SMALL), 1e6, Worker(world_size=4, device=device))
    assert speeds["tokens_per_s"] == 16e6
    if peak:
        assert speeds["mfu"] == pytest.approx(16e6 * flops_per_token(SMALL) / (4 * peak))
    else:
        assert "mfu" not in speeds


def test_a_cpu_has_no_share_of_a_peak() -> None:
    assert speeds_in(Language(SMALL), 10.0, Worker(device=CPU)) == {"tokens_per_s": 160.0}


# Training.


def learner_of(data: Prepared, **changes: Any) -> Learner:
    config = text_config(Path("/unused"), "stdlib", **changes)
    return Learner(config, data, Length.of(config, data.num_train), Worker(device=CPU))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Prepared:
    return task_of(text_config(tmp_path_factory.mktemp("rows"), corpus)).data


@pytest.fixture(scope="module")
def batch(rows: Prepared) -> Batch:
    return LocalCopy(rows, rows.train)[np.arange(64)]


def test_a_batch_in_passes_moves_the_weights_as_a_whole_one(rows: Prepared, batch: Batch) -> None:
    settings: dict[str, Any] = {"train__optimizer": {"name": "sgd", "weight_decay": 0.0}}
    whole, parts = (
        learner_of(rows, train__micro_batch_size=size, **settings) for size in (None, 16)
    )
    for step in range(3):
        all_sums = [whole.new_sums(), parts.new_sums()]
        for learner, sums in zip((whole, parts), all_sums, strict=True):
            learner.step(batch, sums, epoch=0, step_in_epoch=step)
        assert all_sums[1].sums.tolist() == pytest.approx(all_sums[0].sums.tolist(), rel=1e-5)
        assert all_sums[0].sums[1] == all_sums[0].sums[3] == 64 * 16
    for name, weight in whole.network.state_dict().items():
        torch.testing.assert_close(parts.network.state_dict()[name], weight, rtol=1e-4, atol=1e-6)


def test_bf16_learns_what_fp32_learns(rows: Prepared, batch: Batch) -> None:
    found = []
    for precision in ("fp32", "bf16"):
        learner = learner_of(rows, train__precision=precision)
        sums = learner.new_sums()
        for step in range(8):
            learner.step(batch, sums, epoch=0, step_in_epoch=step)
        found.append(learner.validate([batch]).loss)
    assert found[1] != found[0]
    assert found[1] == pytest.approx(found[0], rel=0.02)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++"))), reason="no C++ compiler here")
def test_a_compiled_model_learns_what_the_plain_one_learns(rows: Prepared, batch: Batch) -> None:
    plain, compiled = (learner_of(rows, train__compile=each) for each in (False, True))
    for step in range(3):
        for learner in (plain, compiled):
            learner.step(batch, learner.new_sums(), epoch=0, step_in_epoch=step)
    found = compiled.validate([batch]).loss
    assert found == pytest.approx(plain.validate([batch]).loss, rel=1e-4)


def test_validation_counts_each_byte_once(rows: Prepared, batch: Batch) -> None:
    learner = learner_of(rows)
    whole = learner.validate([batch])
    parts = [batch.rows(start, start + 20) for start in (0, 20, 40, 60)]
    cut = learner.validate(parts)
    assert (whole.num_samples, cut.num_samples) == (64, 64)
    assert cut.loss == pytest.approx(whole.loss, rel=1e-6)
    assert cut.metrics == pytest.approx(whole.metrics)


def entropy(text: bytes) -> float:
    """Nats per byte of one who knows how often each byte comes, and nothing else."""
    shares = np.array(list(Counter(text).values())) / len(text)
    return float(-(shares * np.log(shares)).sum())


ALL_STATE: dict[str, Any] = {
    "train__schedule": {"name": "cosine", "warmup_samples": 200, "final_share": 0.1},
    "train__ema_decay": 0.9,
    "train__clip_norm": 1.0,
    "train__micro_batch_size": 24,
    "train__global_batch_size": 72,
    "train__model__dropout": 0.1,
    "train__early_stopping": {"patience_epochs": 9},
    "data__drop_last": False,
}
"""A run with everything that a checkpoint must bring back, and whose last batch is smaller."""


@pytest.mark.ci
def test_a_run_that_was_killed_in_mid_epoch_has_the_weights_of_one_that_was_not(
    tmp_path: Path, corpus: Path
) -> None:
    changes = {**ALL_STATE, "train__epochs": 3, "checkpoint__every_samples": 144}
    changes["checkpoint__keep"] = 99
    whole = text_config(tmp_path / "whole", corpus, **changes)
    cut = text_config(tmp_path / "cut", corpus, **changes)
    assert train_here(whole).resumed_from is None
    newest = kill_after_saves(cut, 3, attempt=1)
    start = train_here(cut, attempt=2).resumed_from
    assert start is not None
    assert start >= newest
    assert same(final_weights(cut), final_weights(whole))
    steps = [record["step"] for record in metrics(cut)]
    assert steps == sorted(set(steps))
    for key in ("loss", "accuracy", "val_loss", "val_accuracy", "samples"):
        assert [record[key] for record in metrics(cut, "epoch")] == pytest.approx(
            [record[key] for record in metrics(whole, "epoch")], rel=1e-6
        )


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain", marks=pytest.mark.ci),
        pytest.param(ALL_STATE, id="all state", marks=pytest.mark.slow),
    ],
)
def test_fsdp2_learns_what_ddp_learns_step_by_step_and_ddp_what_one_worker_learns(
    tmp_path: Path, corpus: Path, changes: dict[str, Any]
) -> None:
    changes = {**changes, "train__model__dropout": 0.0, "scaling__num_workers": 2}
    changes["train__micro_batch_size"] = 18 if "data__drop_last" in changes else None
    shared = text_config(tmp_path / "fsdp2", corpus, train__strategy="fsdp2", **changes)
    copied = text_config(tmp_path / "ddp", corpus, **changes)
    alone = text_config(tmp_path / "one", corpus, **{**changes, "scaling__num_workers": 1})
    of_shared, of_copied = losses_of_steps(shared, copied)
    with step_losses(Worker(device=CPU)) as of_one:
        train_here(alone)
    assert len(of_one) == metrics(alone)[-1]["step"] > 10
    assert of_shared == pytest.approx(of_copied, rel=1e-4)
    assert of_copied == pytest.approx(of_one, rel=1e-4)
    assert losses(shared) == pytest.approx(losses(copied), rel=1e-4)
    assert losses(copied) == pytest.approx(losses(alone), rel=1e-4)
    weights = weights_of_any(shared)
    for name, weight in weights_of_any(copied).items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-2, atol=1e-3)


# A whole run, and what it leaves.


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> TrainerConfig:
    """A run that has succeeded."""
    storage = tmp_path_factory.mktemp("runs")
    config = text_config(
        storage, corpus, train__epochs=3, train__global_batch_size=16, train__ema_decay=0.9
    )
    process = FORKSERVER.Process(target=run_alone, args=(config,))
    process.start()
    process.join()
    assert process.exitcode == 0
    return config


def run_alone(config: TrainerConfig) -> None:
    """An attempt without Ray, in a process of its own."""
    from trainyard_trainer.attempt import without_ray
    from trainyard_trainer.run_folder.log import Output

    with Output() as output:
        without_ray.run(config, output, {})


@pytest.fixture
def folder(ended: TrainerConfig) -> RunFolder:
    return open_folder(ended)


def test_it_learns_more_than_how_often_each_byte_comes(ended: TrainerConfig, corpus: Path) -> None:
    text = b"".join(file.read_bytes() for file in sorted(corpus.iterdir()))
    last = metrics(ended, "epoch")[-1]
    assert last["val_loss"] < 0.8 * entropy(text)
    assert last["val_accuracy"] > 0.3


def test_speed_is_told_in_tokens_everywhere(ended: TrainerConfig, folder: RunFolder) -> None:
    for record in [*metrics(ended), json.loads(folder.read(folder.progress))]:
        assert record["tokens_per_s"] == pytest.approx(16 * record["samples_per_s"], rel=1e-3)
        assert "mfu" not in record
    assert re.search(r"  [\d,]+ tokens/s", progress_text(record))
    summary = json.loads(folder.read(folder.summary))
    assert re.search(r" \([\d,]+ tokens/s, goodput \d+%\); model", summary_text(summary))
    assert summary["tokens_per_s"] == pytest.approx(16 * summary["samples_per_s"], rel=0.01)


def test_what_is_delivered_needs_nothing_but_torch_and_what_model_json_says(
    folder: RunFolder,
) -> None:
    facts = json.loads(folder.read(folder.model_facts))
    assert (facts["recipe"], facts["weights"]) == ("language_model", "moving average")
    assert facts["input"] == {"shape": [None, None], "dtype": "int64"}
    network = Transformer(Gpt.model_validate(facts["model"]))
    network.load_state_dict(torch.load(folder.model, weights_only=True))
    saved = read_saved(folder, "last")
    assert same(saved.weights, dict(network.state_dict()))
    assert saved.facts.keys() == facts.keys()


def test_a_model_is_exported_as_weights_and_in_no_form_for_images_alone(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainyard_trainer.tools import export

    out = str(tmp_path / "model.pt")
    assert export.main([folder.root, "--out", out]) == 0
    assert same(torch.load(out, weights_only=True), read_saved(folder, "delivered").weights)
    assert json.loads(Path(f"{out}.json").read_text())["recipe"] == "language_model"
    with pytest.raises(
        ConfigError,
        match="--format onnx supports only models whose inputs vary in the number of samples",
    ):
        export.main([folder.root, "--format", "onnx"])
    capsys.readouterr()


@pytest.mark.ci
def test_torch_alone_loads_the_network_for_texts_of_any_number_and_length(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainyard_trainer.tools import export

    out = tmp_path / "model.pt2"
    assert export.main([folder.root, "--out", str(out), "--format", "pt2"]) == 0
    capsys.readouterr()
    network = read_saved(folder, "delivered").build()
    inputs = [torch.randint(8, shape) for shape in ((1, 1), (4, 5), (2, 16))]
    with torch.inference_mode():
        wanted = [network(texts) for texts in inputs]
    torch.testing.assert_close(asked(out, inputs), wanted)


# Writing.


def test_a_text_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    def write(seed: int, temperature: float = 1.0, length: int = 40) -> list[list[int]]:
        return continued(
            network_of(),
            b"the ",
            count=2,
            length=length,
            context_length=16,
            temperature=temperature,
            seed=seed,
        )

    assert write(0) == write(0) != write(1)
    assert write(0)[0] != write(0)[1]
    assert write(0, temperature=0)[0] == write(1, temperature=0)[1]
    # However small, a temperature above 0 draws, and then the likeliest byte.
    assert write(0, temperature=1e-30) == write(0, temperature=0)
    assert all(len(text) <= 5 for text in write(0, length=5))


def test_bytes_that_come_one_after_the_other_are_scored_as_those_that_come_at_once() -> None:
    network, row, memory = network_of(), row_of(b"", b"abcdefgh"), Memory()
    with torch.no_grad():
        at_once = network(row)
        pieces = [network(part, memory) for part in (row[:, :4], row[:, 4:5], row[:, 5:])]
    assert memory.length == 9
    assert torch.allclose(torch.cat(pieces, dim=1), at_once, atol=1e-4)


def test_the_likeliest_text_is_that_of_the_network_itself() -> None:
    network = network_of()
    row = [SEPARATOR, *b"the "]
    for _ in range(12):
        row.append(int(network(torch.tensor([row]))[0, -1].argmax()))
    options: dict[str, Any] = {"context_length": 16, "temperature": 0.0, "seed": 0}
    (found,) = continued(network, b"the ", length=12, **options)
    assert found == row[5:]
    # Longer than the context: on from its last half.
    (longer,) = continued(network, b"the ", length=13, **options)
    assert longer == [*found, int(network(torch.tensor([row[-8:]]))[0, -1].argmax())]


def test_a_text_ends_where_its_document_does() -> None:
    class Ending(nn.Module):
        """After three bytes, the end."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, bytes_NT: torch.Tensor, memory: Memory) -> torch.Tensor:
            memory.length += bytes_NT.shape[1]
            scores = torch.full((*bytes_NT.shape, 256), -100.0)
            scores[..., SEPARATOR if memory.length >= 6 else ord("x")] = 100.0
            return scores

    options: dict[str, Any] = {"length": 9, "context_length": 16, "temperature": 1.0, "seed": 0}
    assert continued(Ending(), b"ab", **options) == [[*b"xxx"]]


def test_a_prompt_is_continued_by_the_delivered_weights(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [folder.root, "--prompt", "the sm", "--length", "30"]
    printed = []
    for more in ([], [], ["--seed", "1"], ["--temperature", "0"], ["--json"]):
        assert predict.main([*words, *more]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
    assert printed[0].startswith("the sm")
    assert json.loads(printed[4])["text"] == printed[0].removeprefix("the sm").removesuffix("\n")
    assert set(re.findall("[a-z]+", printed[3])) & set(WORDS)


def test_pictures_for_text_and_text_for_pictures_are_refused(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="which takes text: trainyard predict RUN --prompt TEXT"):
        predict.main([folder.root, "a.png"])
    for words in ([], ["a.png", "--prompt", "x"]):
        with pytest.raises(SystemExit):
            predict.main([folder.root, *words])
    with pytest.raises(ConfigError, match="has a byte 0"):
        predict.main([folder.root, "--prompt", "a\0b"])
    images = small_config(tmp_path, train__epochs=1)
    train_here(images)
    with pytest.raises(ConfigError, match="takes images: trainyard predict RUN IMAGE"):
        predict.main([open_folder(images).root, "--checkpoint", "last", "--prompt", "a"])
    capsys.readouterr()


# The report.


def test_the_report_has_bits_per_byte_and_texts_and_nothing_of_images(
    ended: TrainerConfig, folder: RunFolder
) -> None:
    page = folder.read(folder.report).decode()
    last = metrics(ended, "epoch")[-1]
    assert f"{last['val_loss'] / math.log(2):.3f}" in page
    assert "validation bits per byte" in page
    assert "Tokens per second" in page
    assert page.count("<pre>") == 6
    assert not re.search(r"confusion\"|Worst mistakes|<img|[Ii]mages", page)


def test_written_text_is_shown_as_text() -> None:
    shown = texts(b"a <b>", [(0.5, [b"<script>x</script>\xff\x07\n"])])
    assert "<script>" not in shown
    assert "<span>a &lt;b&gt;</span>&lt;script&gt;x&lt;/script&gt;\ufffd\ufffd\n" in shown
    assert readable("é\tß".encode()) == "é\tß"


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (b"one two three four", b"one two"),
        (b"x\0one two three four", b"one two"),
        (b"\0\0\0", b""),
        (b"short", b"short"),
        (b"withoutanyblank", b"withoutany"),
        ("ääääääää".encode(), "äääää".encode()),
    ],
)
def test_a_prompt_is_the_beginning_of_a_document_in_whole_words(row: bytes, prompt: bytes) -> None:
    assert prompt_of(row, 10) == prompt


# On Ray.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "loader"),
    [("ddp", "torch"), ("ddp", "ray"), ("fsdp2", "torch"), ("deepspeed", "torch")],
)
def test_two_workers_on_ray_learn_text_and_go_on_where_they_have_ended(
    attempts: Attempts, corpus: Path, strategy: str, loader: str
) -> None:
    for epochs in (1, 2):
        made = text_config(attempts.storage, corpus, train__epochs=epochs, train__strategy=strategy)
        config = ray_config(
            attempts,
            train=made.train.model_dump(),
            data=made.data.model_dump() | {"loader": loader},
        )
        (summary,) = lines(attempts.finish(config), "summary")
        assert (summary["outcome"], summary["epochs"]) == ("succeeded", epochs)
    assert summary["resumed_from"] == committed(config)[0]
    assert [record["epoch"] for record in metrics(config, "epoch")] == [1, 2]
    assert summary["tokens_per_s"] > 0
    assert read_json(config, "model.json")["recipe"] == "language_model"
