"""Worker groups that lose workers or a node, start again, and go on from the state in the nodes' memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attempts import Attempts, check_metrics, ray_config, wait_for
from own_recipes import own_config
from replaced_workers import Loss
from restarted_groups import check_same, starts, train
from training import open_folder, small_config

from trainyard_trainer.config.kept_state import why_not_kept
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.engine.neighbours import holders_of_copies
from trainyard_trainer.engine.state_copies import MEASURED, Pace
from trainyard_trainer.parallel.units import UNIT_PARAMETERS
from trainyard_trainer.run_folder.measurements.progress import read_lines

NODES = ("a", "a", "b", "b")
"""The node of each rank."""

STEPS = 11
"""The number of steps of an epoch."""


def replicated_config(storage: Path) -> TrainerConfig:
    """A small run with DDP whose weights, their average and the optimizer's state all workers have alike.

    Of the buffers of its batch norm layers, those of worker 0 count. Its steps have two passes.
    """
    return small_config(
        storage,
        scaling__num_workers=len(NODES),
        train__ema_decay=0.9,
        train__micro_batch_size=16,
    )


def sharded_config(storage: Path) -> TrainerConfig:
    """A small run with FSDP2 whose weights, their average and the optimizer's state four workers share."""
    return own_config(storage, workers=len(NODES), strategy="fsdp2", ema_decay=0.9)


def zero_config(storage: Path, **options: Any) -> TrainerConfig:
    """The same with DeepSpeed. In stage 3 the workers share the largest weight, and each has all others."""
    return own_config(
        storage,
        workers=len(NODES),
        model={"width": UNIT_PARAMETERS // 10},
        strategy="deepspeed",
        deepspeed=options,
        clip_norm=1.0,
    )


MakeConfig = Callable[[Path], TrainerConfig]


@pytest.fixture(
    params=[
        replicated_config,
        sharded_config,
        partial(zero_config, stage=3),
        pytest.param(partial(zero_config, stage=1), marks=pytest.mark.slow),
        pytest.param(partial(zero_config, stage=2, offload="optimizer"), marks=pytest.mark.slow),
        pytest.param(partial(zero_config, stage=3, offload="all"), marks=pytest.mark.slow),
    ],
    ids=["ddp", "fsdp2", "zero 3", "zero 1", "zero 2 offloaded", "zero 3 offloaded"],
)
def make_config(code: Path, request: pytest.FixtureRequest) -> MakeConfig:
    make: MakeConfig = request.param
    return make


@pytest.fixture
def undisturbed(make_config: MakeConfig, tmp_path: Path) -> TrainerConfig:
    return train(make_config(tmp_path / "undisturbed"), nodes=[NODES])


IN_STEP_5 = Loss(rank=1, method="_optimizer_step", call=5)
BEFORE_VALIDATION = Loss(rank=3, method="validate", life=1)


@pytest.mark.ci
def test_workers_that_are_killed_cost_at_most_one_step(
    tmp_path: Path, make_config: MakeConfig, undisturbed: TrainerConfig
) -> None:
    config = make_config(tmp_path / "run")
    train(config, [IN_STEP_5, BEFORE_VALIDATION], nodes=[NODES])
    assert starts(config) == [(False, 0), (True, 4), (True, STEPS)]
    check_same(config, undisturbed)


@pytest.mark.ci
def test_a_node_that_is_lost_with_its_memory_costs_at_most_two_steps(
    tmp_path: Path, make_config: MakeConfig, undisturbed: TrainerConfig
) -> None:
    config = make_config(tmp_path / "run")
    losses = [IN_STEP_5, Loss(rank=0, method="_optimizer_step", call=4, life=1)]
    # The workers of the first lost node go to a new one, those of the second change places with others.
    train(config, losses, ["a", "b"], [NODES, ("c", "c", "b", "b"), ("d", "c", "c", "d")])
    (_, (is_first, first), (is_second, second)) = starts(config)
    assert is_first
    assert is_second
    assert 3 <= first <= 4
    assert first + 2 <= second <= first + 3
    check_same(config, undisturbed)


@pytest.mark.ci
def test_without_the_memory_of_any_node_they_go_on_from_the_checkpoint(
    tmp_path: Path, make_config: MakeConfig, undisturbed: TrainerConfig
) -> None:
    config = make_config(tmp_path / "run")
    losses = [
        Loss(rank=1, method="_optimizer_step", call=STEPS + 3),
        # The memory of the second group holds fewer steps than that of the first one.
        Loss(rank=1, method="_optimizer_step", call=2, life=1),
    ]
    train(config, losses, ["a"], [("a", "a", "a", "a")])
    (_, (is_from_memory, step), third) = starts(config)
    assert not is_from_memory
    assert step in (
        0,
        STEPS,
    )  # the checkpoint of the first epoch was complete in time, or there was none
    assert third == (True, step + 1)
    check_same(config, undisturbed)


@pytest.mark.parametrize(
    ("nodes", "holders"),
    [
        ("aabb", {0: 2, 1: 2, 2: 0, 3: 0}),
        ("abab", {0: 1, 1: 2, 2: 3, 3: 0}),
        ("aab", {0: 2, 1: 2, 2: 0}),
        ("aa", {}),
    ],
)
def test_another_node_holds_the_copy_of_a_state(nodes: str, holders: dict[int, int]) -> None:
    assert holders_of_copies(nodes) == holders


@pytest.mark.parametrize(("kept_s", "share"), [(0.25, 0.25), (4.0, 4.0)])
def test_the_pace_tells_what_a_state_costs_of_a_step(kept_s: float, share: float) -> None:
    pace = Pace(MEASURED)
    for number in range(MEASURED):
        began = number * (3 + kept_s)
        pace.note(3 * number, began, began + kept_s)
    assert pace.is_full
    assert pace.share_of_each_step() == pytest.approx(share)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"train__strategy": "ddp"}, None),
        ({"train__strategy": "deepspeed"}, None),
        (
            {
                "train__strategy": "ddp",
                "scaling__num_workers": 2,
                "faults__replace_workers": True,
            },
            "faults.replace_workers = true: the other workers keep their state",
        ),
        ({"data__loader": "ray"}, "data.loader = ray"),
    ],
)
def test_a_run_whose_state_is_not_kept_says_why(
    tmp_path: Path, changes: dict[str, Any], why: str | None
) -> None:
    assert why_not_kept(small_config(tmp_path, **{"train__strategy": "fsdp2", **changes})) == why


@pytest.mark.ci
def test_workers_on_ray_go_on_from_memory(attempts: Attempts) -> None:
    changes = {"train__strategy": "fsdp2", "train__epochs": 3}
    config = ray_config(attempts, **changes, faults__keep_state=True)
    driver = attempts.start(config)
    folder = open_folder(config)
    assert wait_for(
        lambda: any(each["step"] > 5 for each in read_lines(folder, folder.metrics)), 120
    )
    os.kill(attempts.processes("RayTrainWorker")[0], signal.SIGKILL)
    output, _ = driver.communicate()
    assert driver.returncode == 0, output
    check_metrics(config, 3)
    ((_, first), (is_from_memory, step)) = starts(config)
    assert is_from_memory
    assert step > first
    undisturbed = ray_config(attempts, **changes, storage__path=str(attempts.storage / "whole"))
    train(undisturbed, nodes=[("a", "a")])
    check_same(config, undisturbed)
