"""What a new attempt finds, keeps and refuses."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_run import GOAL
from training import open_folder, small_config

from trainyard_trainer.checkpointing import resume
from trainyard_trainer.checkpointing.checkpoint import (
    MODEL,
    STATE,
    Checkpoints,
)
from trainyard_trainer.checkpointing.resume import Start
from trainyard_trainer.config.data.section import Data
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.identity import MAY_CHANGE
from trainyard_trainer.config.training.recipes import RECIPE_MODELS
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_files.names import CHECKPOINT_MANIFEST
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import Trained, read_lines
from trainyard_trainer.run_folder.measurements.startup import Startup
from trainyard_trainer.run_folder.ownership.fence import Fence


def save(config: TrainerConfig, samples: int, fence: Fence) -> str:
    """A checkpoint in mid-epoch whose weights are its samples."""
    return Checkpoints(open_folder(config)).save(
        Trained(step=samples // 10, samples=samples, steps_in_epoch=samples // 10),
        attempt=fence.attempt,
        group=fence.group,
        contents={MODEL: {"weight": torch.tensor([float(samples)])}, STATE: {"partial_epoch": {}}},
        facts={
            "config": config.model_dump(mode="json"),
            "data": {},
            "goal": asdict(GOAL),
        },
    )


class Group:
    """A worker group that has taken over, and what it said of its start."""

    def __init__(self, config: TrainerConfig, attempt: int) -> None:
        self.config = config
        folder = open_folder(config)
        self.fence = Fence.claim(folder, attempt)
        self.said: list[str] = []
        self.start = resume.begin(
            folder, config, self.fence, self.said.append, began=1.0, workers=1
        ).name

    def save(self, *samples: int) -> list[str]:
        return [save(self.config, count, self.fence) for count in samples]


def names(config: TrainerConfig) -> list[str]:
    return Checkpoints(open_folder(config)).names()


def interval_lines(*steps: int) -> str:
    """Lines of metrics.jsonl up to these steps, of 10 samples each."""
    return "".join(
        json.dumps({"kind": "interval", "step": step, "samples": 10 * step}) + "\n"
        for step in steps
    )


# The line of descent.


def test_a_new_group_goes_on_from_the_newest_checkpoint_of_the_one_before(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    first = Group(config, attempt=1)
    assert (first.start, first.said) == (None, [])
    _, newest = first.save(100, 200)
    second = Group(config, attempt=1)
    assert (second.start, second.said) == (newest, [])
    (newest,) = second.save(300)
    third = Group(config, attempt=2)
    assert (third.start, third.said) == (newest, [])
    folder = open_folder(config)
    starts = read_lines(folder, folder.starts)
    places = [(each["attempt"], each["group"], each["samples"], each["step"]) for each in starts]
    assert places == [(1, 1, 0, 0), (1, 2, 200, 20), (2, 1, 300, 30)]
    assert [each["time"] for each in starts] == sorted(each["time"] for each in starts)


def test_a_start_tells_how_far_the_one_before_had_come_and_once_more_how_long_it_took(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path)
    folder = open_folder(config)
    Group(config, attempt=1).save(100)
    folder.append(folder.metrics, interval_lines(14, 15))
    folder.write(folder.progress, '{"step": 17, "loop_s": 3.5}')
    second = Group(config, attempt=1)
    startup = Startup(began=5.0, seconds={"workers": 2.0}, loop_began=8.0)
    resume.note_started(folder, second.fence, startup)
    told, again = read_lines(folder, folder.starts)[1:]
    assert (told["step"], told["reached_step"], told["reached_loop_s"]) == (10, 17, 3.5)
    assert again == told | {"loop_began": 8.0, "startup": {"began": 5.0, "workers": 2.0}}


@pytest.mark.parametrize("attempt", [1, 2], ids=["another group", "another attempt"])
def test_what_an_older_group_commits_after_a_newer_one_has_begun_is_passed_over_and_removed(
    tmp_path: Path, attempt: int
) -> None:
    config = small_config(tmp_path)
    old = Group(config, attempt=1)
    (shared,) = old.save(100)
    new = Group(config, attempt=attempt)
    assert new.start == shared
    (own,) = new.save(200)
    # The old group wakes up between its last look and its commit.
    (stray,) = old.save(300)
    third = Group(config, attempt=3)
    assert third.start == own
    assert third.said == [
        f"checkpoint {stray} is passed over: attempt 1 wrote it, but attempt {attempt} resumed "
        "from 100 samples"
    ]
    assert names(config) == [own, shared]


def test_a_stray_checkpoint_is_no_start_either_where_the_newer_group_saved_nothing(
    tmp_path: Path,
) -> None:
    config = small_config(tmp_path)
    old = Group(config, attempt=1)
    (shared,) = old.save(100)
    Group(config, attempt=2)
    old.save(300)
    assert Group(config, attempt=3).start == shared
    assert names(config) == [shared]


def test_a_stray_checkpoint_from_before_any_other_leads_back_to_the_seed(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    old = Group(config, attempt=1)
    Group(config, attempt=2)
    old.save(300)
    assert Group(config, attempt=3).start is None
    assert names(config) == []


def test_a_checkpoint_that_was_there_when_the_newer_group_began_stays_good(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    (shared,) = Group(config, attempt=1).save(100)
    for attempt in (2, 3, 4):
        group = Group(config, attempt=attempt)
        assert (group.start, group.said) == (shared, [])


# Checkpoints that cannot be used.


def lose_manifest(folder: RunFolder, name: str) -> None:
    folder.delete(Checkpoints(folder).path(name, CHECKPOINT_MANIFEST))


def damage(folder: RunFolder, name: str) -> None:
    path = Path(Checkpoints(folder).path(name, STATE))
    path.write_bytes(path.read_bytes()[::-1])


def delete_file(folder: RunFolder, name: str) -> None:
    folder.delete(Checkpoints(folder).path(name, MODEL))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lose_manifest, "it was never committed: manifest.json is missing"),
        (damage, "state.pt is not what was written: its SHA-256 differs"),
        (delete_file, "model.pt is missing"),
    ],
)
def test_a_run_goes_on_from_the_newest_intact_checkpoint_and_says_so(
    tmp_path: Path, harm: Any, reason: str
) -> None:
    config = small_config(tmp_path)
    folder = open_folder(config)
    good, bad = Group(config, attempt=1).save(100, 200)
    harm(folder, bad)
    folder.append(folder.metrics, interval_lines(10, 15))
    second = Group(config, attempt=2)
    assert second.start == good
    (line,) = second.said
    assert line.startswith(f"checkpoint {bad} is passed over: {reason}")
    assert names(config) == [good]
    assert read_lines(folder, folder.metrics) == [{"kind": "interval", "step": 10, "samples": 100}]
    # What is trained again may be saved under any name.
    assert second.save(200) == ["s000000000200-a2.1"]
    assert Group(config, attempt=3).start == "s000000000200-a2.1"


def test_a_checkpoint_whose_folder_was_deleted_is_not_missed(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    good, gone = Group(config, attempt=1).save(100, 200)
    folder = open_folder(config)
    folder.delete(Checkpoints(folder).path(gone))
    assert Group(config, attempt=2).start == good


def test_with_no_checkpoint_left_the_run_begins_anew(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    folder = open_folder(config)
    for name in Group(config, attempt=1).save(100, 200):
        damage(folder, name)
    folder.append(folder.metrics, interval_lines(1))
    second = Group(config, attempt=2)
    assert second.start is None
    assert len(second.said) == 2
    assert names(config) == []
    assert folder.read(folder.metrics) == b""


def test_old_halves_of_a_removal_go_too(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    half, good = Group(config, attempt=1).save(100, 200)
    lose_manifest(open_folder(config), half)
    assert Group(config, attempt=2).start == good
    assert names(config) == [good]


# What a worker starts from.


def test_a_worker_starts_from_what_was_chosen(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    (name,) = Group(config, attempt=1).save(100)
    start = Start.of(open_folder(config), name)
    assert start.trained == Trained(step=10, samples=100, steps_in_epoch=10)
    assert start.weights is not None
    assert start.weights["weight"].tolist() == [100]
    assert start.state == {"partial_epoch": {}}


def test_a_worker_starts_from_the_seed_where_nothing_was_chosen(tmp_path: Path) -> None:
    assert Start.of(open_folder(small_config(tmp_path)), None) == Start()
    assert Start().trained == Trained()


# Metrics.


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    folder = open_folder(small_config(tmp_path))
    records = [
        {"kind": "interval", "step": step, "samples": step * 10, "epoch": 1} for step in range(1, 6)
    ]
    records.append({"kind": "epoch", "step": 5, "samples": 50, "epoch": 1})
    lines = "".join(json.dumps(record) + "\n" for record in records)
    folder.append(folder.metrics, lines + '{"step": 6, "sam')

    def kept(trained: Trained) -> list[tuple[str, int]]:
        resume.cut_metrics(folder, trained)
        return [(each["kind"], each["step"]) for each in read_lines(folder, folder.metrics)]

    steps = [("interval", step) for step in range(1, 6)]
    assert kept(Trained(epoch=1, samples=50)) == [*steps, ("epoch", 5)]
    # The end of the epoch is repeated, after its last step.
    assert kept(Trained(epoch=0, samples=50, steps_in_epoch=5)) == steps
    assert kept(Trained(samples=30, steps_in_epoch=3)) == steps[:3]
    assert kept(Trained()) == []


# Another run.

OTHER: dict[str, Any] = {
    "train__seed": 7,
    "train__model__name": "resnet34",
    "train__optimizer": {"name": "adamw"},
    "data__loader": "ray",
    "data__augment": {"flip": True},
    "train__epochs": 4,
}

DIFFERENCES = (
    "data.augment.flip: False -> True",
    "data.loader: torch -> ray",
    "train.model.name: shufflenet_v2_x0_5 -> resnet34",
    "train.optimizer.learning_rate: 0.02 -> 0.001",
    "train.optimizer.name: sgd -> adamw",
    "train.seed: 0 -> 7",
    "train.epochs: 5 -> 4 (it can only be increased)",
)

ALLOWED: dict[str, Any] = {
    "train__epochs": 9,
    "train__micro_batch_size": 16,
    "train__compile": True,
    "train__channels_last": True,
    "data__decode_workers": 3,
    "data__max_bad_samples": 5,
    "data__endpoint": "http://elsewhere:9000",
    "scaling__num_workers": 4,
    "scaling__cpus_per_worker": 8,
    "checkpoint__keep": 5,
    "checkpoint__deliver": "best",
    "faults__retries": 0,
}


def test_a_run_that_learns_something_else_is_refused_field_by_field(tmp_path: Path) -> None:
    before = small_config(tmp_path, train__epochs=5)
    folder = open_folder(before)
    resume.check_identity(folder, before)
    folder.write(folder.run, before.model_dump_json())
    with pytest.raises(ConfigError) as refusal:
        resume.check_identity(folder, small_config(tmp_path, **OTHER))
    for line in DIFFERENCES:
        assert f"       {line}\n" in str(refusal.value)
    assert "--name" in str(refusal.value)


def test_a_checkpoint_of_another_run_is_refused_field_by_field_and_stays(tmp_path: Path) -> None:
    before = small_config(tmp_path, train__epochs=5)
    (name,) = Group(before, attempt=1).save(100)
    with pytest.raises(ConfigError) as refusal:
        Group(small_config(tmp_path, **OTHER), attempt=2)
    assert f"already exists in checkpoint {name} with a different config" in str(refusal.value)
    for line in DIFFERENCES:
        assert f"       {line}\n" in str(refusal.value)
    assert names(before) == [name]


@pytest.mark.parametrize("change", ALLOWED)
def test_what_does_not_change_what_is_learnt_may_change(tmp_path: Path, change: str) -> None:
    before = small_config(tmp_path)
    (name,) = Group(before, attempt=1).save(100)
    folder = open_folder(before)
    folder.write(folder.run, before.model_dump_json())
    after = small_config(tmp_path, **{change: ALLOWED[change]})
    assert after != before
    resume.check_identity(folder, after)
    assert Group(after, attempt=2).start == name


def test_what_may_change_are_names_of_the_config() -> None:
    data = Data.model_fields.keys()
    train = {key for model in RECIPE_MODELS for key in model.model_fields}
    assert MAY_CHANGE["data"] <= data
    assert MAY_CHANGE["train"] <= train


def test_a_value_that_only_one_of_two_configs_has_is_a_difference() -> None:
    one, other = {"a": {"b": 1}}, {"a": {"b": 1, "c": None, "d": 2}, "e": "x"}
    assert resume.differences(one, other) == ["a.d: None -> 2", "e: None -> x"]
    assert resume.differences(one, json.loads(json.dumps(one))) == []
