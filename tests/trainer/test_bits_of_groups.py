"""Worker groups of three and more that are killed and resume from the checkpoint with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from own_recipes import own_config
from replaced_workers import Loss
from restarted_groups import check_same, starts, train
from training import small_config

from trainyard_trainer.config.trainer_config import TrainerConfig

WORKERS = 3
"""With more than two workers, rounding depends on the order in which gradients are summed."""

BATCH = 126
"""The global batch size, which three workers can share. An epoch has 11 steps."""

IN_SECOND_EPOCH = Loss(rank=1, method="_optimizer_step", call=19)


def built_in(storage: Path, **changes: Any) -> TrainerConfig:
    """A network with branches, whose gradients come in another order than its weights are defined."""
    return small_config(
        storage,
        scaling__num_workers=WORKERS,
        train__global_batch_size=BATCH,
        checkpoint__every_samples=3 * BATCH,
        **changes,
    )


def check_resumed_bits(disturbed: TrainerConfig, whole: TrainerConfig, loss: Loss) -> None:
    """Train both to the end, one of them with the loss of a worker, and compare them."""
    train(whole)
    train(disturbed, [loss])
    (_, (_, step)) = starts(disturbed)
    assert step > 0
    check_same(disturbed, whole)


@pytest.mark.ci
@pytest.mark.parametrize(
    "changes",
    [
        {"train__ema_decay": 0.9},
        {"train__micro_batch_size": 21},
        pytest.param({"train__strategy": "fsdp2"}, marks=pytest.mark.slow),
        pytest.param({"train__strategy": "deepspeed"}, marks=pytest.mark.slow),
    ],
    ids=["one pass", "several passes", "fsdp2", "deepspeed"],
)
def test_three_workers_resume_with_the_same_bits(tmp_path: Path, changes: dict[str, Any]) -> None:
    check_resumed_bits(
        built_in(tmp_path / "run", **changes),
        built_in(tmp_path / "whole", **changes),
        IN_SECOND_EPOCH,
    )


@pytest.mark.ci
def test_three_workers_that_train_several_networks_resume_with_the_same_bits(
    code: Path, tmp_path: Path
) -> None:
    run, whole = (
        own_config(tmp_path / name, "gan", workers=WORKERS, epochs=4, global_batch_size=33)
        for name in ("run", "whole")
    )
    check_resumed_bits(run, whole, Loss(rank=1, method="validate", call=3))
