"""Runs whose workers are killed and replaced one by one, and end as if no worker had been lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from causal_runs import LORA, causal_config, write_chats
from own_recipes import own_config
from replaced_workers import Loss, WorkerFailed, epoch_ends, train_with_losses
from training import final_weights, metrics, open_folder, same, small_config

from tests.support.tiny_models import make_folder
from trainyard_trainer.checkpointing.checkpoint import STATE, Checkpoints
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.run_folder.measurements.progress import read_lines

CHANGES: dict[str, Any] = {
    "train__epochs": 2,
    "train__global_batch_size": 126,
    "train__ema_decay": 0.9,
    "data__augment": {"flip": True, "crop": 1},
    "checkpoint__every_samples": 300,
    "data__drop_last": False,
}
"""12 steps an epoch, the last one with few samples."""

MOMENTS: dict[str, list[Loss]] = {
    "in the first step": [Loss(rank=1, method="backward")],
    "worker 0 in the first step": [Loss(rank=0, method="backward")],
    "before its gradients are exchanged": [
        Loss(rank=1, method="backward", call=5),
        Loss(rank=0, method="backward", call=9),
    ],
    "after its gradients were exchanged": [
        Loss(rank=1, method="_optimizer_step", call=4),
        Loss(rank=0, method="_optimizer_step", call=16),
    ],
    "after a step": [
        Loss(rank=1, method="_optimizer_step", call=4, is_after=True),
        Loss(rank=0, method="_optimizer_step", call=16, is_after=True),
    ],
    "after the last step of an epoch": [
        Loss(rank=1, method="_optimizer_step", call=12, is_after=True),
        Loss(rank=0, method="_optimizer_step", call=24, is_after=True),
    ],
    "before it exchanges signals": [
        Loss(rank=1, method="exchange"),
        Loss(rank=0, method="exchange", call=2),
    ],
    "after it has exchanged signals": [
        Loss(rank=1, method="exchange", is_after=True),
        Loss(rank=0, method="exchange", call=2, is_after=True),
    ],
    "before a validation": [
        Loss(rank=1, method="validate"),
        Loss(rank=0, method="validate", call=2),
    ],
    "after a validation": [
        Loss(rank=1, method="validate", is_after=True),
        Loss(rank=0, method="validate", call=2, is_after=True),
    ],
    "when the metrics of an epoch are recorded": [
        Loss(rank=0, method="epoch"),
        Loss(rank=0, method="epoch", is_after=True, life=1),
    ],
    "when it begins to save": [
        Loss(rank=0, method="save"),
        Loss(rank=0, method="save", is_after=True, life=1),
    ],
    "while it saves": [Loss(rank=0, method="write", is_after=True)],
    "when it has trained to the end": [
        Loss(rank=1, method="finish"),
        Loss(rank=0, method="finish"),
    ],
    "while it replaces another": [
        Loss(rank=1, method="backward", call=5),
        Loss(rank=1, method="load", life=1),
        Loss(rank=1, method="load", is_after=True, life=2),
        Loss(rank=1, method="join_group", life=3),
        Loss(rank=0, method="backward", call=18),
        Loss(rank=0, method="load", is_after=True, life=1),
        Loss(rank=0, method="note_replacement", is_after=True, life=2),
    ],
    "while others are told of a loss": [
        Loss(rank=1, method="backward", call=5),
        Loss(rank=0, method="join_group"),
    ],
    "with its node": [
        Loss(rank=1, method="backward", call=5, takes_node=True),
        Loss(rank=0, method="_optimizer_step", call=16, takes_node=True),
        Loss(rank=0, method="backward", call=5, life=1, takes_node=True),
    ],
    "with its node at the end of an epoch": [
        Loss(rank=1, method="validate", takes_node=True),
        Loss(rank=0, method="validate", call=2, takes_node=True),
    ],
    "with its node, and another alone": [
        Loss(rank=0, method="backward", call=5),
        Loss(rank=1, method="backward", call=5, takes_node=True),
    ],
    "with another at once": [
        Loss(rank=0, method="backward", call=5),
        Loss(rank=1, method="backward", call=5),
    ],
}

CASES = [
    (moment, workers)
    for moment in MOMENTS
    for workers in (2, 3)
    if workers == 3 or moment in ("before its gradients are exchanged", "while it replaces another")
]
"""Of two workers, the order in which gradients are summed does not matter; of three it does."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], TrainerConfig]:
    """Return a run without losses of so many workers."""

    @cache
    def train(workers: int) -> TrainerConfig:
        storage = tmp_path_factory.mktemp("undisturbed")
        return train_with_losses(storage, image_config(storage, workers))

    return train


def image_config(storage: Path, workers: int) -> TrainerConfig:
    return small_config(storage, scaling__num_workers=workers, **CHANGES)


def learner_state(config: TrainerConfig) -> dict[str, Any]:
    checkpoints = Checkpoints(open_folder(config))
    newest = checkpoints.newest()
    assert newest
    state: dict[str, Any] = checkpoints.load(newest.name, STATE)["learner"]
    return state


def check_same(disturbed: TrainerConfig, whole: TrainerConfig) -> None:
    """The weights, their average and the metrics of all epochs are the same, and each step is there once."""
    assert same(final_weights(disturbed), final_weights(whole))
    average, average_of_whole = (learner_state(each)["average"] for each in (disturbed, whole))
    assert same(average, average_of_whole)
    assert epoch_ends(disturbed) == epoch_ends(whole)
    steps = [record["step"] for record in metrics(disturbed)]
    assert steps == sorted(set(steps))


def replaced_ranks(config: TrainerConfig) -> list[int]:
    folder = open_folder(config)
    return [rank for each in read_lines(folder, folder.replacements) for rank in each["ranks"]]


@pytest.mark.ci
@pytest.mark.parametrize(("moment", "workers"), CASES)
def test_a_run_whose_workers_are_lost_is_like_an_undisturbed_one(
    tmp_path: Path, undisturbed: Callable[[int], TrainerConfig], moment: str, workers: int
) -> None:
    losses = MOMENTS[moment]
    config = train_with_losses(tmp_path, image_config(tmp_path, workers), losses)
    check_same(config, undisturbed(workers))
    # A replacement is recorded when all of its group train; another one may have been needed before.
    replaced = set(replaced_ranks(config))
    assert replaced
    assert replaced <= {loss.rank for loss in losses}


def test_a_state_that_was_lost_with_all_nodes_that_had_it_ends_the_workers(tmp_path: Path) -> None:
    """Of three workers on nodes of their own, the next one has the copy of each one's state."""
    losses = [Loss(rank=rank, method="backward", call=5, takes_node=True) for rank in (0, 1)]
    with pytest.raises(WorkerFailed, match="has failed"):
        train_with_losses(tmp_path, image_config(tmp_path, 3), losses)


LOSSES_IN_STEPS = [
    Loss(rank=1, method="backward", call=4),
    Loss(rank=0, method="_optimizer_step", call=8),
]


def causal(storage: Path, tmp_path: Path, **changes: Any) -> TrainerConfig:
    """A language model with dropout, whose batches weigh as many tokens as they have."""
    folder = tmp_path / "model"
    if not folder.exists():
        make_folder(folder, dropout=0.1)
    chats = write_chats(tmp_path / "chats.jsonl")
    return causal_config(storage, folder, chats, scaling__num_workers=2, **changes)


RECIPES: dict[str, Callable[[Path, Path], TrainerConfig]] = {
    "a recipe of the user": lambda storage, _: own_config(storage, "regression", workers=2),
    "a fine-tuned language model": causal,
    "an adapter": partial(causal, train__model__adapter=LORA),
    "passes of unknown weight": partial(
        causal, train__micro_batch_size=1, train__global_batch_size=8
    ),
}


@pytest.mark.ci
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_recipe_continues_after_the_loss_of_workers(
    code: Path, tmp_path: Path, recipe: str
) -> None:
    config_of = RECIPES[recipe]
    whole, config = (
        train_with_losses(tmp_path / name, config_of(tmp_path / name, tmp_path), losses)
        for name, losses in (("whole", ()), ("disturbed", LOSSES_IN_STEPS))
    )
    check_same(config, whole)
    assert replaced_ranks(config) == [1, 0]


def test_workers_of_several_networks_take_a_loss_as_their_own_failure(
    code: Path, tmp_path: Path
) -> None:
    """An update of one network cannot be taken back when the exchange for another one fails."""
    config = own_config(tmp_path, "gan", workers=2)
    with pytest.raises(WorkerFailed, match="worker 0 has failed"):
        train_with_losses(tmp_path, config, [Loss(rank=1, method="backward", call=4)])
