"""What the trainer's loop costs in each step, beside a loop written by hand; one process, no loader.

With next to no network the cost shows, which is the same at any size; ResNet-18 shows what it means.
Counted is CPU time, which other work on the machine changes less than the clock on the wall.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.bench import runs
from tests.bench.loops import Counted, Settings, again_and_again, by_hand, ours, same_batch
from tests.bench.rounds import Options, Row, Section, alternate, main, ratios
from trainyard_trainer.config.training.models import Model
from trainyard_trainer.data.prepared import DatasetInfo
from trainyard_trainer.parallel.worker import Worker

GREY = DatasetInfo(
    source="made", shape=(1, 28, 28), classes=tuple("0123456789"), mean=(0.5,), std=(0.25,)
)
LARGEST_SHARE = 1.01


def line(model: Model) -> nn.Module:
    """As little network as can be."""
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, model.num_classes))


def settings_of(batch_size: int, steps: int, **more: Any) -> Settings:
    config = runs.config(
        "step",
        Path("/made"),
        train__global_batch_size=batch_size,
        train__precision="fp32",
        scaling__num_workers=1,
    )
    return Settings(
        config=config,
        images=GREY,
        worker=Worker(device=torch.device("cpu")),
        steps=steps,
        skip=2,
        clock=time.process_time,
        **more,
    )


def compare(settings: Settings, rounds: int) -> dict[str, tuple[float, ...]]:
    """CPU seconds per step."""
    batch = same_batch(settings)

    def turn(learn: Callable[..., Counted]) -> Callable[[], float]:
        return lambda: learn(again_and_again(batch, settings)).step_s

    return alternate({"ours": turn(ours(settings)), "by hand": turn(by_hand(settings))}, rounds)


def measure(options: Options) -> list[Section]:
    torch.set_num_threads(1)
    rounds = options.rounds_or(9)
    tiny = compare(settings_of(64, options.choose(1000, 30), build=line), rounds)
    real = compare(settings_of(64, options.choose(15, 1)), rounds)
    costs = tuple(a - b for a, b in zip(tiny["ours"], tiny["by hand"], strict=True))
    step_s = sorted(real["by hand"])[rounds // 2]
    rows = (
        Row(
            what="ResNet-18, 28x28, batch of 64: step of the loop over step by hand",
            unit="x",
            values=ratios(real["ours"], real["by hand"]),
            at_most=LARGEST_SHARE,
        ),
        Row(
            what="the same step by hand", unit="ms", values=tuple(s * 1e3 for s in real["by hand"])
        ),
        Row(
            what="what the loop adds to a step of next to no network",
            unit="ms",
            values=tuple(cost * 1e3 for cost in costs),
        ),
        Row(
            what="that as a share of a ResNet-18 step",
            unit="%",
            values=tuple(100 * cost / step_s for cost in costs),
            at_most=1.0,
        ),
    )
    notes = ("CPU time of one thread; no loader, no other worker.",)
    return [Section(title="The loop's own cost", rows=rows, notes=notes)]


if __name__ == "__main__":
    main(measure)
