"""Runs that are killed again and again, anywhere, and still end as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attempts import Attempts, committed, read_json, read_records, reading, wait_for
from replaced_workers import epoch_ends
from training import (
    final_weights,
    open_folder,
    run_processes,
    same,
    small_config,
    train_as_rank,
)

from trainyard_trainer.checkpointing.checkpoint import (
    STATE,
    Checkpoints,
)
from trainyard_trainer.config.trainer_config import TrainerConfig

LIFE_S = 2.5
"""How long a run may live after it has said where it starts, at most: some lives see no step."""


def train_alone(config: TrainerConfig) -> None:
    """Train a run that nothing disturbs, without Ray, in processes that are forked for it."""
    count = config.scaling.num_workers
    meeting_point = Path(config.storage.path) / "meeting-point"
    meeting_point.parent.mkdir()
    run_processes(train_as_rank, (count, str(meeting_point), config), count)


def kill_at_random(
    attempts: Attempts, config: TrainerConfig, random: random.Random, *arguments: str
) -> None:
    """Start an attempt and kill its driver at a random moment, from its first words on."""
    driver = attempts.start(config, arguments=arguments)
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.startswith("start: "):
            break
    # The time of death is what is tested: nothing is waited for.
    time.sleep(random.uniform(0, LIFE_S))
    assert driver.poll() is None, f"the run was over before it was killed: {driver.stdout.read()}"
    driver.kill()
    driver.communicate()


def check_accounts(config: TrainerConfig, epochs: int, samples_per_epoch: int) -> None:
    """Each step is on record once, and each epoch has all its samples."""
    records = read_records(config, "metrics.jsonl")
    steps = [record["step"] for record in records]
    assert steps == sorted(set(steps))
    ended = [record for record in records if record["kind"] == "epoch"]
    assert [record["epoch"] for record in ended] == list(range(1, epochs + 1))
    assert [record["samples"] for record in ended] == [
        samples_per_epoch * epoch for epoch in range(1, epochs + 1)
    ]
    for record in ended:
        # Loss and hits were summed over each sample once, through all deaths.
        hits = record["accuracy"] * samples_per_epoch
        assert hits == pytest.approx(round(hits), abs=2e-3)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kills", "epochs"),
    [pytest.param(2, 16, marks=pytest.mark.ci), pytest.param(20, 200, marks=pytest.mark.slow)],
)
def test_a_run_that_is_killed_anywhere_has_the_weights_of_one_that_was_not(
    attempts: Attempts, kills: int, epochs: int
) -> None:
    changes: dict[str, Any] = {
        "train__epochs": epochs,
        "train__ema_decay": 0.99,
        "data__augment": {"flip": True, "crop": 1},
        "data__drop_last": False,
        "checkpoint__every_samples": 256,
    }
    whole = small_config(attempts.storage / "whole", **changes)
    killed = small_config(attempts.storage, **changes)
    train_alone(whole)
    rng = random.Random(20)
    for _ in range(kills):
        kill_at_random(attempts, killed, rng, "--without-ray")
    attempts.finish(killed, arguments=["--without-ray"])
    assert same(final_weights(killed), final_weights(whole))
    assert read_json(killed, "summary.json")["attempts"] == kills + 1
    check_accounts(killed, epochs, 1438)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("loader", "kills", "epochs"),
    [
        pytest.param("ray", 2, 12, marks=pytest.mark.ci),
        pytest.param("torch", 20, 150, marks=pytest.mark.slow),
        pytest.param("ray", 20, 150, marks=pytest.mark.slow),
    ],
)
def test_no_sample_is_lost_or_used_twice_when_drivers_die_and_workers_come_and_go(
    attempts: Attempts, loader: str, kills: int, epochs: int
) -> None:
    rng = random.Random(7)

    def config_for(workers: int) -> TrainerConfig:
        return small_config(
            attempts.storage,
            data__loader=loader,
            data__drop_last=False,
            train__epochs=epochs,
            train__global_batch_size=126,
            scaling__num_workers=workers,
            checkpoint__every_samples=252,
        )

    for life in range(kills):
        config = config_for(1 + life % 3)
        kill_at_random(attempts, config, rng)
        check_bitmap(config)
    attempts.finish(config_for(2))
    check_accounts(config_for(2), epochs, 1438)
    assert committed(config_for(2))


def check_bitmap(config: TrainerConfig) -> None:
    """The newest checkpoint of a Ray loader names as many samples as its epoch has used."""
    checkpoints = Checkpoints(open_folder(config))
    newest = checkpoints.newest()
    if newest is None or config.data.loader == "torch" or not newest.trained.steps_in_epoch:
        return
    begun = checkpoints.load(newest.name, STATE)["partial_epoch"]
    used = np.unpackbits(begun["batches"]["handed_out"].numpy())
    assert used.sum() == newest.trained.samples - 1438 * newest.trained.epoch


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kills", "epochs"),
    [pytest.param(3, 20, marks=pytest.mark.ci), pytest.param(20, 80, marks=pytest.mark.slow)],
)
def test_no_step_is_repeated_when_workers_are_killed_anywhere(
    attempts: Attempts, kills: int, epochs: int
) -> None:
    changes: dict[str, Any] = {
        "train__epochs": epochs,
        "train__ema_decay": 0.99,
        "train__global_batch_size": 126,
        "data__augment": {"flip": True, "crop": 1},
        "data__drop_last": False,
        "checkpoint__every_samples": 5000,
        "scaling__num_workers": 3,
    }
    whole = small_config(attempts.storage / "whole", **changes)
    killed = small_config(
        attempts.storage,
        faults__replace_workers=True,
        faults__worker_failures=2 * kills,
        **changes,
    )
    driver = attempts.start(killed)
    with reading(driver) as output:
        assert wait_for(lambda: attempts.read(killed, "metrics.jsonl"), 120), output
        rng = random.Random(20)
        for _ in range(kills):
            kill_a_worker(attempts, killed, driver, rng)
        assert driver.wait() == 0, output
    train_alone(whole)
    assert same(final_weights(killed), final_weights(whole))
    assert epoch_ends(killed) == epoch_ends(whole)
    check_accounts(killed, epochs, 1438)
    groups = {(each["attempt"], each["group"]) for each in read_records(killed, "starts.jsonl")}
    assert groups == {(1, 1)}, output


def kill_a_worker(
    attempts: Attempts, config: TrainerConfig, driver: subprocess.Popen[str], rng: random.Random
) -> None:
    """Kill a worker, or two of three at once, at a random moment, and wait until it is replaced."""
    # The time of death is what is tested: nothing is waited for.
    time.sleep(rng.uniform(0, LIFE_S))
    before = attempts.read(config, "replacements.jsonl").count("\n")
    workers = read_json(config, "workers.json")["workers"]
    for worker in rng.sample(workers, rng.choice((1, 1, 2))):
        os.kill(worker["process"], signal.SIGKILL)
    assert wait_for(
        lambda: attempts.read(config, "replacements.jsonl").count("\n") > before or driver.poll(),
        120,
    )
    assert driver.poll() is None
