"""The bottleneck of a run: find it from the time spent per phase, and suggest a change of the run file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from typing_extensions import assert_never

from trainyard_trainer.config.data.section import Data
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.own_recipe import OwnData
from trainyard_trainer.config.training.train import ImageClassification
from trainyard_trainer.data.loading.rows import DataInfo
from trainyard_trainer.data.loading.torch_loader import decode_workers

Kind = Literal[
    "start-up-bound",
    "input-bound",
    "communication-bound",
    "checkpoint-bound",
    "validation-bound",
    "compute-bound",
]

STARTUP_LIMIT = 0.5
"""The share of start-up in the whole run from which on a run is start-up-bound. Start-up occurs once per
attempt: the shares of such a short run say nothing about a longer one."""

LIMITS = {
    # A loader that is fast enough causes no wait. Without a wait of 10 %, a run is 11 % faster.
    "data": 0.10,
    # A batch twice as large halves the share. Below a quarter, that saves less than an eighth of the time.
    "communication": 0.25,
    # Training waits only for the copy to memory. The limit is five times CHECKPOINT_AIM.
    "checkpoint": 0.05,
    # A fifth of the data, with the forward pass only, takes about a tenth. The limit is three times that.
    "validation": 0.33,
}
"""The shares of the time after start-up from which on a phase counts as the bottleneck."""

STARTUP_AIM = 0.1
"""The share of start-up in a run that is long enough."""

CHECKPOINT_AIM = 0.01
"""The share of checkpoints that a remedy aims at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The bottleneck of a run, and a change of the run file that reduces it."""

    kind: Kind
    share: float
    """The share of the time after start-up; for a start-up-bound run, of the whole time."""
    sentence: str
    remedy: str
    """A line of the run file, such as `data.decode_workers: 4`."""


def judge(
    seconds: Mapping[str, float], config: TrainerConfig, *, epochs: int, images: DataInfo
) -> Verdict:
    """Return the phase with the largest share among those above their limit; if there is none, the steps.

    `seconds` has the time of each measured phase, and at least one of them is not zero. `epochs` is the
    number of trained epochs.
    """
    whole = sum(seconds.values())
    running = whole - seconds["startup"]
    if seconds["startup"] >= STARTUP_LIMIT * whole:
        return _startup(seconds["startup"] / whole, config)
    shares = {part: seconds[part] / running for part in LIMITS if part in seconds}
    above = [part for part, share in shares.items() if share >= LIMITS[part]]
    if not above:
        return _compute(seconds, running, config)
    largest = max(above, key=lambda part: shares[part])
    share = shares[largest]
    if largest == "data":
        return _input(share, config, images)
    if largest == "communication":
        return _communication(share, config)
    if largest == "checkpoint":
        return _checkpoint(share, config, epochs=epochs, epoch_s=running / epochs)
    return _validation(share, config)


def _startup(share: float, config: TrainerConfig) -> Verdict:
    # The time of start-up is constant; the rest is proportional to the epochs.
    rest = max(1 - share, 0.01)
    longer = math.ceil(config.train.epochs * (1 / STARTUP_AIM - 1) * share / rest)
    return Verdict(
        kind="start-up-bound",
        share=share,
        sentence=f"Start-up took {share:.0%} of the time: the run is too short to find another bottleneck. "
        f"With {longer:,} epochs, start-up would take about a tenth.",
        remedy=f"train.epochs: {longer}",
    )


def _input(share: float, config: TrainerConfig, images: DataInfo) -> Verdict:
    wait = f"Training waited for batches for {share:.0%} of the time after start-up. "
    # The worker itself needs one CPU; the others can prepare batches.
    most = max(config.scaling.cpus_per_worker - 1, 1)
    match config.data.loader:
        case "ray":
            sentence = "The torch loader does not copy batches through Ray's object store."
            remedy = "data.loader: torch"
        case "torch" if decode_workers(config.data, config.scaling, images) < most:
            sentence = "More processes per worker prepare batches faster."
            remedy = f"data.decode_workers: {most}"
        case "torch":
            sentence = "All CPUs of each worker already prepare batches. Ray's tasks use those of all nodes."
            remedy = "data.loader: ray"
        case _:
            assert_never(config.data.loader)
    return Verdict(kind="input-bound", share=share, sentence=wait + sentence, remedy=remedy)


def _communication(share: float, config: TrainerConfig) -> Verdict:
    return Verdict(
        kind="communication-bound",
        share=share,
        sentence=f"Exchanging gradients and waiting for the slowest worker took {share:.0%} of the time "
        "after start-up. With batches twice as large, gradients are exchanged half as often. This affects "
        "convergence: adjust the learning rate too.",
        remedy=f"train.global_batch_size: {2 * config.train.global_batch_size}",
    )


def _checkpoint(share: float, config: TrainerConfig, *, epochs: int, epoch_s: float) -> Verdict:
    wanted = config.checkpoint
    rarer = math.ceil(share / CHECKPOINT_AIM)
    stall = f"Training waited for checkpoints for {share:.0%} of the time after start-up. "
    cure = f"If they are saved {rarer} times less often, this takes about {CHECKPOINT_AIM:.0%}."
    if wanted.every_samples is not None:
        remedy = f"checkpoint.every_samples: {wanted.every_samples * rarer}"
    elif wanted.every_s is not None and wanted.every_s < wanted.every_epochs * epoch_s:
        remedy = f"checkpoint.every_s: {wanted.every_s * rarer:g}"
    elif wanted.every_epochs < epochs:
        remedy = f"checkpoint.every_epochs: {min(wanted.every_epochs * rarer, epochs)}"
    else:
        cure = "It was only the last checkpoint. In a longer run, its share is smaller."
        remedy = f"train.epochs: {epochs * rarer}"
    return Verdict(kind="checkpoint-bound", share=share, sentence=stall + cure, remedy=remedy)


def _validation(share: float, config: TrainerConfig) -> Verdict:
    match config.data:
        case Data(valid_source=None, valid_share=valid_share):
            remedy = f"data.valid_share: {valid_share / 2:g}"
        case Data(valid_source=valid_source):
            remedy = f"data.valid_source: a part of {valid_source}"
        case OwnData(dataset=dataset):
            remedy = f"data.options: fewer validation samples of {dataset}"
        case _:
            raise AssertionError(config.data)
    return Verdict(
        kind="validation-bound",
        share=share,
        sentence=f"Validation took {share:.0%} of the time after start-up. Half of the validation data "
        "takes half the time.",
        remedy=remedy,
    )


def _compute(seconds: Mapping[str, float], running: float, config: TrainerConfig) -> Verdict:
    share = seconds["compute"] / running
    is_apart = "communication" in seconds
    steps = "Training steps" if is_apart else "Training steps, including communication,"
    train, scaling = config.train, config.scaling
    if not scaling.use_gpu:
        faster, remedy = "A GPU computes them many times faster.", "resources.gpus: 1"
    elif train.precision in ("fp32", "tf32"):
        faster, remedy = "Lower precision is faster on most GPUs.", "train.precision: bf16"
    elif isinstance(train, ImageClassification) and not train.channels_last:
        faster = "The memory format channels_last makes convolutions faster on most GPUs."
        remedy = "train.channels_last: true"
    elif not train.compile:
        faster, remedy = "A compiled model is faster on most GPUs.", "train.compile: true"
    else:
        faster = "More GPUs make the run faster."
        remedy = f"resources.gpus: {2 * scaling.num_workers}"
    return Verdict(
        kind="compute-bound",
        share=share,
        sentence=f"{steps} took {share:.0%} of the time after start-up; no other phase is above its limit. "
        f"{faster}",
        remedy=remedy,
    )
