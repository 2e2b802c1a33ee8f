"""What held a run back: from where its time went to the one line of its config worth changing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainyard_trainer.config.train import ImageClassification
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.loading.torch_loader import decode_workers
from trainyard_trainer.data.prepared import DatasetInfo

Kind = Literal[
    "start-up-bound",
    "input-bound",
    "communication-bound",
    "checkpoint-bound",
    "validation-bound",
    "compute-bound",
]

STARTUP_LIMIT = 0.5
"""Share of the whole run. Start-up is paid once per attempt: where it is the most, the run is too short
for its other shares to say anything."""

LIMITS = {
    # A loader that keeps up hides behind the steps altogether. Without a wait of a tenth, a run
    # is 11 % faster; below that, other things matter more.
    "data": 0.10,
    # A batch twice as large halves it. Below a quarter that gains less than an eighth.
    "communication": 0.25,
    # Only the copy to memory is waited for: five times CHECKPOINT_AIM is more than bad luck.
    "checkpoint": 0.05,
    # A fifth of the data, forwards only, after each epoch: about a tenth. Three times that is much.
    "validation": 0.33,
}
"""From which share of the time after start-up on a part is worth changing something."""

STARTUP_AIM = 0.1
"""What start-up may be of a run that is long enough."""

CHECKPOINT_AIM = 0.01
"""What checkpoints should cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What bounds a run, and the line that moves the bound."""

    kind: Kind
    share: float
    """Of the time after start-up; for a start-up-bound run, of the whole."""
    sentence: str
    remedy: str
    """A line of the run file, such as `data.decode_workers: 4`."""


def judge(
    seconds: Mapping[str, float], config: TrainerConfig, *, epochs: int, images: DatasetInfo
) -> Verdict:
    """The largest part that is above its limit; if none is, the steps themselves.

    `seconds` has the parts that are told apart, and not all of them are zero; `epochs` were trained.
    """
    whole = sum(seconds.values())
    running = whole - seconds["startup"]
    if seconds["startup"] >= STARTUP_LIMIT * whole:
        return _startup(seconds["startup"] / whole, config)
    shares = {part: seconds[part] / running for part in LIMITS if part in seconds}
    too_much = [part for part, share in shares.items() if share >= LIMITS[part]]
    if not too_much:
        return _compute(seconds, running, config)
    largest = max(too_much, key=lambda part: shares[part])
    share = shares[largest]
    if largest == "data":
        return _input(share, config, images)
    if largest == "communication":
        return _communication(share, config)
    if largest == "checkpoint":
        return _checkpoint(share, config, epochs=epochs, epoch_s=running / epochs)
    return _validation(share, config)


def _startup(share: float, config: TrainerConfig) -> Verdict:
    # Start-up stays, the rest grows with the epochs.
    rest = max(1 - share, 0.01)
    longer = math.ceil(config.train.epochs * (1 / STARTUP_AIM - 1) * share / rest)
    return Verdict(
        kind="start-up-bound",
        share=share,
        sentence=f"Start-up took {share:.0%} of the run: it is too short to say what bounds it. "
        f"It would be a tenth of a run of {longer:,} epochs.",
        remedy=f"train.epochs: {longer}",
    )


def _input(share: float, config: TrainerConfig, images: DatasetInfo) -> Verdict:
    wait = f"Training waited for its batches {share:.0%} of the time after start-up. "
    # The worker itself needs a CPU; each other one can prepare batches.
    most = max(config.scaling.cpus_per_worker - 1, 1)
    if config.data.loader == "ray":
        sentence = "Processes beside each worker bring batches without the way through Ray's store."
        remedy = "data.loader: torch"
    elif decode_workers(config.data, config.scaling, images) < most:
        sentence = "More processes beside each worker prepare them sooner."
        remedy = f"data.decode_workers: {most}"
    else:
        sentence = "Each worker's own CPUs are at it already; Ray Data uses those of all nodes."
        remedy = "data.loader: ray"
    return Verdict(kind="input-bound", share=share, sentence=wait + sentence, remedy=remedy)


def _communication(share: float, config: TrainerConfig) -> Verdict:
    return Verdict(
        kind="communication-bound",
        share=share,
        sentence=f"Exchanging gradients, and waiting for the slowest worker, took {share:.0%} of "
        "the time after start-up. A batch twice as large exchanges them half as often; it changes "
        "what is learnt, so look at the learning rate, too.",
        remedy=f"train.global_batch_size: {2 * config.train.global_batch_size}",
    )


def _checkpoint(share: float, config: TrainerConfig, *, epochs: int, epoch_s: float) -> Verdict:
    wanted = config.checkpoint
    rarer = math.ceil(share / CHECKPOINT_AIM)
    stall = f"Training stood still for checkpoints {share:.0%} of the time after start-up. "
    cure = f"Saved {rarer} times less often, they cost about {CHECKPOINT_AIM:.0%}."
    if wanted.every_samples is not None:
        remedy = f"checkpoint.every_samples: {wanted.every_samples * rarer}"
    elif wanted.every_s is not None and wanted.every_s < wanted.every_epochs * epoch_s:
        remedy = f"checkpoint.every_s: {wanted.every_s * rarer:g}"
    elif wanted.every_epochs < epochs:
        remedy = f"checkpoint.every_epochs: {min(wanted.every_epochs * rarer, epochs)}"
    else:
        cure = "It was the one at the end, which weighs less in a longer run."
        remedy = f"train.epochs: {epochs * rarer}"
    return Verdict(kind="checkpoint-bound", share=share, sentence=stall + cure, remedy=remedy)


def _validation(share: float, config: TrainerConfig) -> Verdict:
    data = config.data
    remedy = f"data.valid_share: {data.valid_share / 2:g}"
    if data.valid_source is not None:
        remedy = f"data.valid_source: a part of {data.valid_source}"
    return Verdict(
        kind="validation-bound",
        share=share,
        sentence=f"Validation took {share:.0%} of the time after start-up. Half as much validation "
        "data takes half as long.",
        remedy=remedy,
    )


def _compute(seconds: Mapping[str, float], running: float, config: TrainerConfig) -> Verdict:
    share = seconds["compute"] / running
    is_apart = "communication" in seconds
    steps = "The steps themselves" if is_apart else "The steps, with what workers exchange in them,"
    train, scaling = config.train, config.scaling
    if not scaling.use_gpu:
        faster, remedy = "A GPU computes them many times faster.", "resources.gpus: 1"
    elif train.precision in ("fp32", "tf32"):
        faster, remedy = "Shorter numbers are faster on most GPUs.", "train.precision: bf16"
    elif isinstance(train, ImageClassification) and not train.channels_last:
        faster = "Another order of pixels in memory makes convolutions faster on most GPUs."
        remedy = "train.channels_last: true"
    elif not train.compile:
        faster, remedy = "A compiled model is faster on most GPUs.", "train.compile: true"
    else:
        faster = "Nothing is left but more GPUs."
        remedy = f"resources.gpus: {2 * scaling.num_workers}"
    return Verdict(
        kind="compute-bound",
        share=share,
        sentence=f"{steps} took {share:.0%} of the time after start-up, and nothing else is in their "
        f"way. {faster}",
        remedy=remedy,
    )
