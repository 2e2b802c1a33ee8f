"""A checkpoint is there whole or not at all, wherever its writer dies; and those that must stay do."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import fs
from training import small_config

from trainyard_trainer.checkpointing import resume
from trainyard_trainer.checkpointing.checkpoint import (
    MODEL,
    STATE,
    VALIDATION,
    Checkpoints,
    Damaged,
)
from trainyard_trainer.checkpointing.retention import best_of, prune
from trainyard_trainer.config.checkpoint import CheckpointConfig as Rule
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.recipes import best_goal
from trainyard_trainer.errors import RunError
from trainyard_trainer.run_files.names import CHECKPOINT_MANIFEST, CheckpointName
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import Trained, read_lines
from trainyard_trainer.run_folder.ownership.fence import Fence, Fenced


class Killed(BaseException):
    """The process ends here; nothing that follows reaches the disk."""


class Mortal:
    """A local filesystem whose process dies before its n-th change to the disk."""

    def __init__(self, dies_before: int) -> None:
        self.real = fs.LocalFileSystem()
        self.left = dies_before

    def change(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def create_dir(self, path: str) -> None:
        self.change()
        self.real.create_dir(path)

    def move(self, source: str, target: str) -> None:
        self.change()
        self.real.move(source, target)

    def delete_file(self, path: str) -> None:
        self.change()
        self.real.delete_file(path)

    def delete_dir(self, path: str) -> None:
        # A filesystem may begin with any file; the manifest last is the worst.
        for file in sorted(Path(path).iterdir(), reverse=True):
            self.delete_file(str(file))
        self.change()
        self.real.delete_dir(path)

    def open_output_stream(self, path: str, compression: None) -> MortalStream:
        self.change()
        return MortalStream(self.real.open_output_stream(path, compression), self)

    def open_append_stream(self, path: str, compression: None) -> MortalStream:
        self.change()
        return MortalStream(self.real.open_append_stream(path, compression), self)


class MortalStream:
    def __init__(self, real: Any, owner: Mortal) -> None:
        self.real = real
        self.owner = owner

    def __enter__(self) -> MortalStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.real.close()

    def write(self, data: bytes) -> None:
        self.owner.change()
        self.real.write(data)


SMALL_TRAIN = {"recipe": "image_classification"}

ACCURATE = best_goal(SMALL_TRAIN, None)


def mortal_folder(path: Path, dies_before: int) -> RunFolder:
    folder = RunFolder.open(str(path), "small")
    folder.filesystem = Mortal(dies_before)  # type: ignore[assignment]
    return folder


def save(
    folder: RunFolder,
    epoch: int,
    *,
    steps_in_epoch: int = 0,
    attempt: int = 1,
    group: int = 1,
    val_accuracy: float = 0.5,
    val_loss: float = 0.5,
    before_commit: Callable[[], None] = lambda: None,
) -> str:
    """A checkpoint of epochs of 100 samples, whose weights are its number of samples."""
    samples = epoch * 100 + steps_in_epoch * 10
    contents: dict[str, Any] = {
        MODEL: {"weight": torch.full((50,), float(samples))},
        STATE: {"learner": {"lr": 0.1}, "partial_epoch": {"loss_sums": torch.ones(3)}},
    }
    if not steps_in_epoch:
        contents[VALIDATION] = {"num_samples": 3, "loss": val_loss}
    return Checkpoints(folder).save(
        Trained(
            epoch=epoch,
            step=samples // 10,
            samples=samples,
            steps_in_epoch=steps_in_epoch,
            metrics={"val_accuracy": val_accuracy, "val_loss": val_loss},
        ),
        attempt=attempt,
        group=group,
        contents=contents,
        facts={
            "config": config_of(folder).model_dump(mode="json"),
            "data": {"source": "any"},
            "goal": asdict(ACCURATE),
        },
        before_commit=before_commit,
    )


def config_of(folder: RunFolder) -> TrainerConfig:
    return small_config(Path(folder.root).parent, train__epochs=9)


def weight(folder: RunFolder, name: str) -> float:
    return Checkpoints(folder).load(name, MODEL)["weight"][0].item()


def open_small(path: Path) -> RunFolder:
    return RunFolder.open(str(path), "small")


def begin(folder: RunFolder, *, attempt: int = 2, say: Callable[[str], None] = print) -> str | None:
    """What the first worker group of an attempt does before it trains."""
    fence = Fence.claim(RunFolder.open(str(Path(folder.root).parent), "small"), attempt)
    return resume.begin(folder, config_of(folder), fence, say, began=1.0, workers=1).name


def survives(work: Callable[[], object]) -> bool:
    try:
        work()
    except Killed:
        return False
    return True


def each_death(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """A folder of its own for each number of changes to the disk before a death."""
    return ((dies_before, tmp_path / str(dies_before)) for dies_before in itertools.count())


# Whole or not at all.


@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_between_any_two_writes_leaves_a_loadable_run(tmp_path: Path, keep: int) -> None:
    for dies_before, path in each_death(tmp_path):
        first = save(open_small(path), 1)
        mortal = mortal_folder(path, dies_before)

        def save_and_prune(mortal: RunFolder = mortal) -> None:
            prune(Checkpoints(mortal), Rule(keep=keep), ACCURATE, save(mortal, 2, val_accuracy=0.6))

        is_done = survives(save_and_prune)

        # The next attempt starts from one of the two, and can save its own.
        folder = open_small(path)
        folder.sweep()
        name = begin(folder)
        assert name is not None
        start = resume.Start.of(folder, name)
        assert start.weights is not None
        assert start.weights["weight"][0] == start.trained.samples
        assert start.state is not None
        assert name == first or start.trained.epoch == 2
        last = save(folder, 3, attempt=2, val_accuracy=0.7)
        prune(Checkpoints(folder), Rule(keep=1), ACCURATE, last)
        assert Checkpoints(folder).names() == [last]
        assert [file for file in folder.files() if file.startswith("checkpoints/")] == [
            f"checkpoints/{last}/{file}"
            for file in sorted((CHECKPOINT_MANIFEST, MODEL, STATE, VALIDATION))
        ]
        if is_done:
            break
    assert dies_before > 13, "too few points of death to mean anything"


def test_a_kill_while_the_folder_is_put_back_leaves_it_to_the_next_group(tmp_path: Path) -> None:
    for dies_before, path in each_death(tmp_path):
        folder = open_small(path)
        good, damaged, half = save(folder, 1), save(folder, 2), save(folder, 2, steps_in_epoch=1)
        break_file(folder, damaged, MODEL)
        folder.delete(Checkpoints(folder).path(half, CHECKPOINT_MANIFEST))
        records = [
            {"kind": "interval", "samples": samples, "step": samples // 10} for samples in (50, 150)
        ]
        folder.append(folder.metrics, "".join(json.dumps(record) + "\n" for record in records))

        mortal = mortal_folder(path, dies_before)
        is_done = survives(lambda mortal=mortal: begin(mortal))

        folder.sweep()
        assert begin(folder) == good
        assert Checkpoints(folder).names() == [good]
        assert read_lines(folder, folder.metrics) == records[:1]
        if is_done:
            break
    assert dies_before > 8, "too few points of death to mean anything"


def break_file(folder: RunFolder, name: str, file: str) -> None:
    """Change the last byte, which no size tells."""
    path = Path(Checkpoints(folder).path(name, file))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_nothing_is_committed_once_a_newer_group_has_taken_over(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    first = save(folder, 1)
    old = Fence.claim(folder, 1)
    Fence.claim(folder, 2)
    with pytest.raises(Fenced, match="attempt 2 has taken over"):
        save(folder, 2, before_commit=old.check)
    newest = Checkpoints(folder).newest()
    assert newest is not None
    assert newest.name == first


def test_the_last_look_before_a_commit_is_taken_when_all_files_are_there(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    seen: list[str] = []
    name = save(folder, 1, before_commit=lambda: seen.extend(folder.files()))
    assert seen == [f"checkpoints/{name}/{file}" for file in sorted((MODEL, STATE, VALIDATION))]


def test_a_write_that_was_never_committed_is_passed_over_and_removed(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    first, second = save(folder, 1), save(folder, 2)
    folder.delete(Checkpoints(folder).path(second, CHECKPOINT_MANIFEST))
    said: list[str] = []
    assert begin(folder, say=said.append) == first
    assert said == [
        f"checkpoint {second} is passed over: it was never committed: manifest.json is missing"
    ]
    assert Checkpoints(folder).names() == [first]


@pytest.mark.parametrize("file", [MODEL, STATE, VALIDATION])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-1], "its manifest says"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "its SHA-256 differs"),
        (lambda data: b"", "is 0 bytes long"),
        (None, "is missing"),
    ],
    ids=["truncated", "changed", "empty", "deleted"],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    tmp_path: Path, damage: Any, reason: str, file: str
) -> None:
    folder = open_small(tmp_path)
    first, second = save(folder, 1), save(folder, 2)
    path = Path(Checkpoints(folder).path(second, file))
    if damage:
        path.write_bytes(damage(path.read_bytes()))
    else:
        path.unlink()
    said: list[str] = []
    newest = Checkpoints(folder).newest(said.append)
    assert newest is not None
    assert newest.name == first
    assert len(said) == 1
    assert file in said[0]
    assert reason in said[0]


@pytest.mark.parametrize("text", ["", "{", "{}", '{"format": 4}', '{"files": {}}', "[]"])
def test_a_manifest_that_cannot_be_read_makes_no_checkpoint(tmp_path: Path, text: str) -> None:
    folder = open_small(tmp_path)
    name = save(folder, 1)
    folder.write(Checkpoints(folder).path(name, CHECKPOINT_MANIFEST), text)
    assert Checkpoints(folder).newest() is None
    assert Checkpoints(folder).committed() == []
    assert begin(folder) is None
    assert Checkpoints(folder).names() == []


def test_a_checkpoint_of_another_version_is_neither_used_nor_removed(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    name = save(folder, 1)
    folder.write(Checkpoints(folder).path(name, CHECKPOINT_MANIFEST), '{"format": 1}')
    with pytest.raises(RunError, match="has format 1, this program reads 4"):
        begin(folder)
    assert Checkpoints(folder).names() == [name]


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    name = save(folder, 1)
    checkpoints = Checkpoints(folder)
    found = checkpoints.check(name)
    assert found.trained == Trained(
        epoch=1, step=10, samples=100, metrics={"val_accuracy": 0.5, "val_loss": 0.5}
    )
    assert found.config["train"]["epochs"] == 9
    assert found.data == {"source": "any"}
    assert found.bytes == sum(
        folder.size(checkpoints.path(name, file)) or 0 for file in (MODEL, STATE, VALIDATION)
    )
    assert checkpoints.load(name, STATE)["partial_epoch"]["loss_sums"].tolist() == [1, 1, 1]
    assert checkpoints.load(name, VALIDATION) == {"num_samples": 3, "loss": 0.5}


def test_a_check_tells_of_each_byte_that_it_reads(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    counts: list[int] = []
    checkpoint = Checkpoints(folder).check(save(folder, 1), counts.append)
    assert sum(counts) == checkpoint.bytes


def test_a_removal_cut_short_leaves_no_checkpoint(tmp_path: Path) -> None:
    for dies_before, path in each_death(tmp_path):
        name = save(open_small(path), 1)
        mortal = mortal_folder(path, dies_before)
        is_done = survives(lambda mortal=mortal, name=name: Checkpoints(mortal).delete(name))
        if dies_before:
            with pytest.raises(Damaged, match="never committed"):
                Checkpoints(open_small(path)).check(name)
        if is_done:
            break
    assert dies_before == 5


# Names.


def test_names_sort_by_progress_then_by_attempt_then_by_group(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    for epoch, attempt, group in ((2, 9, 1), (2, 10, 2), (2, 10, 10), (1, 11, 1)):
        save(folder, epoch, attempt=attempt, group=group)
    assert Checkpoints(folder).names() == [
        "s000000000200-a10.10",
        "s000000000200-a10.2",
        "s000000000200-a9.1",
        "s000000000100-a11.1",
    ]


def test_a_name_is_read_as_it_is_written() -> None:
    name = CheckpointName(samples=1234, attempt=5, group=6)
    assert CheckpointName.parse(str(name)) == name
    assert [CheckpointName.parse(text) for text in ("s1-a1.1", "s000000001234-a5", "x")] == [
        None
    ] * 3


# Retention.


def kept_after(folder: RunFolder, rule: Rule, *points: tuple[float, float | None]) -> list[float]:
    """What stays after saves at these points, each with its accuracy; (1.3, None) is in mid-epoch."""
    for epochs, accuracy in points:
        epoch = int(epochs)
        steps_in_epoch = round((epochs - epoch) * 10)
        value = 0.5 if accuracy is None else accuracy
        name = save(
            folder,
            epoch,
            steps_in_epoch=steps_in_epoch,
            val_accuracy=value,
            val_loss=1 - value if math.isfinite(value) else value,
        )
        prune(Checkpoints(folder), rule, best_goal(SMALL_TRAIN, rule.best), name)
    return [
        checkpoint.trained.samples / 100 for checkpoint in reversed(Checkpoints(folder).committed())
    ]


BETTER_AND_BETTER = ((1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5))
BEST_IS_2 = ((1, 0.1), (2, 0.9), (3, 0.3), (4, 0.4), (5, 0.5), (6, 0.6))


@pytest.mark.parametrize(
    ("rule", "points", "kept"),
    [
        # The newest.
        ({"keep": 1}, BETTER_AND_BETTER, [5]),
        ({"keep": 3}, BETTER_AND_BETTER, [3, 4, 5]),
        # The best, by either metric; of equals the earliest.
        ({"keep": 1}, BEST_IS_2, [2, 6]),
        ({"keep": 2, "best": "val_loss"}, BEST_IS_2, [2, 5, 6]),
        ({"keep": 1}, ((1, 0.1), (2, 0.9), (3, 0.9), (4, 0.9)), [2, 4]),
        ({"keep": 1, "best": "val_loss"}, ((1, 0.1), (2, 0.9), (3, 0.9), (4, 0.9)), [2, 4]),
        # What is no number is not the best.
        ({"keep": 1, "best": "val_loss"}, ((1, math.nan), (2, 0.2), (3, 0.1)), [2, 3]),
        ({"keep": 1}, ((1, 0.2), (2, math.nan), (3, 0.1)), [1, 3]),
        # One of each so many epochs.
        ({"keep": 1, "keep_every_epochs": 2}, BETTER_AND_BETTER, [2, 4, 5]),
        ({"keep": 1, "keep_every_epochs": 3}, BEST_IS_2, [2, 3, 6]),
        # Those in mid-epoch go as newer ones come, and are never the best.
        ({"keep": 1}, ((0.5, 0.9), (1, 0.1), (1.5, 0.9)), [1, 1.5]),
        ({"keep": 2}, ((1, 0.1), (1.3, None), (1.6, None), (2, 0.2), (2.5, None)), [2, 2.5]),
        ({"keep": 1, "keep_every_epochs": 1}, ((1, 0.1), (1.5, None), (2, 0.2)), [1, 2]),
    ],
)
def test_what_the_rule_keeps_stays_and_nothing_else(
    tmp_path: Path, rule: dict[str, Any], points: Any, kept: list[float]
) -> None:
    assert kept_after(open_small(tmp_path), Rule(**rule), *points) == kept


def test_of_an_epoch_that_was_trained_twice_the_newest_counts(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    save(folder, 1, attempt=1, val_accuracy=0.9)
    again = save(folder, 1, attempt=2, val_accuracy=0.8)
    best = best_of(Checkpoints(folder).committed(), ACCURATE)
    assert best is not None
    assert best.name == again


def test_nothing_is_the_best_of_nothing(tmp_path: Path) -> None:
    assert best_of([], ACCURATE) is None
    assert kept_after(open_small(tmp_path), Rule(keep=1), (0.5, None)) == [0.5]


def test_a_later_checkpoint_of_an_older_group_takes_no_place_of_the_own(tmp_path: Path) -> None:
    folder = open_small(tmp_path)
    stray = save(folder, 5, attempt=1, val_accuracy=0.9)
    own = save(folder, 3, attempt=2)
    assert prune(Checkpoints(folder), Rule(keep=1), ACCURATE, own) == []
    assert Checkpoints(folder).names() == [stray, own]


def test_nothing_saved_is_nothing_to_start_from(tmp_path: Path) -> None:
    assert begin(open_small(tmp_path)) is None
