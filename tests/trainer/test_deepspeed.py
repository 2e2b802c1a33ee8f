"""DeepSpeed's ZeRO: the same training as with copies, saved in its own format, resumed and delivered whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing
from training import metrics, open_folder, same, small_config, train_as_rank

from trainer.config import TrainerConfig
from trainer.saved import LAST, read_saved

ALL_STATE: dict[str, Any] = {
    # Without batch norm; and in the last step of an epoch one of two workers has a pass more.
    "train__model__name": "squeezenet1_1",
    "train__model__image_size": 32,
    "data__valid_share": 0.33,
    "data__drop_last": False,
    "train__micro_batch_size": 86,
    "train__global_batch_size": 344,
    "train__optimizer": {"name": "adamw"},
    "train__schedule": {"name": "constant"},
    "train__clip_norm": 1.0,
}


def zero(storage: Path, workers: int = 2, stage: int = 3, **changes: Any) -> TrainerConfig:
    return small_config(
        storage,
        **{
            "train__strategy": "deepspeed",
            "train__deepspeed": {"stage": stage},
            "scaling__num_workers": workers,
            **changes,
        },
    )


def train(config: TrainerConfig, attempt: int = 1) -> None:
    """With processes of their own, as many as the config says."""
    workers = config.scaling.num_workers
    storage = Path(config.storage.path)
    storage.mkdir(exist_ok=True)
    meet = str(storage / f"meet-{attempt}")
    multiprocessing.spawn(train_as_rank, (workers, meet, config, attempt), nprocs=workers)


def final_weights(config: TrainerConfig) -> dict[str, torch.Tensor]:
    return read_saved(open_folder(config), LAST).weights


def losses(config: TrainerConfig) -> list[float]:
    ended = metrics(config, "epoch")
    return [record[key] for record in ended for key in ("loss", "val_loss")]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_learns_what_ddp_learns(tmp_path: Path, stage: int) -> None:
    shared = zero(tmp_path / "zero", stage=stage, **ALL_STATE, train__epochs=1)
    copied = zero(
        tmp_path / "ddp",
        **ALL_STATE,
        train__epochs=1,
        train__strategy="ddp",
        train__deepspeed=None,
    )
    train(shared)
    train(copied)
    print(losses(shared), losses(copied))
    assert losses(shared) == pytest.approx(losses(copied), rel=1e-3)
    weights = final_weights(shared)
    assert weights.keys() == final_weights(copied).keys()
    for name, weight in final_weights(copied).items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resume(tmp_path: Path, stage: int) -> None:
    undisturbed = zero(tmp_path / "whole", stage=stage, **ALL_STATE)
    train(undisturbed)
    train(zero(tmp_path / "cut", stage=stage, **ALL_STATE, train__epochs=1))
    resumed = zero(tmp_path / "cut", stage=stage, **ALL_STATE)
    train(resumed, attempt=2)
    assert [record["epoch"] for record in metrics(resumed, "epoch")] == [1, 2]
    assert same(final_weights(resumed), final_weights(undisturbed))
