"""Steady images per second of whole runs: Ray Train beside torchrun, the Ray loader beside the torch loader.

Two CPU workers with one thread each. All runs of a round take turns; a run is left once enough of it has been
seen, so that a round takes as long on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tests.bench import data, runs
from tests.bench.rounds import Options, Row, Section, alternate, main, ratios
from trainyard.local.training import Starter

SMALL_STORE = {"RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(160 * 2**20)}
"""Of which the data of a run may have a quarter: less than the pictures take, once they are decoded."""

LIGHT = {"name": "shufflenet_v2_x0_5", "in_channels": 3, "num_classes": 10, "image_size": 96}
"""A network that leaves a loader little time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A way to train that is measured."""

    name: str
    data: Callable[[], Path]
    way: Starter | Literal["by hand"] = "ray"
    loader: str = "torch"
    changes: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def samples_per_s(self, options: Options) -> float:
        config = runs.config(
            self.name, self.data(), **{"data__loader": self.loader} | dict(self.changes)
        )
        seconds, skip_s = options.choose((30.0, 5.0), (0.5, 0.0))
        if self.way == "by hand":
            return runs.samples_per_s_by_hand(config, seconds=seconds, skip_s=skip_s)
        return runs.samples_per_s(
            config,
            self.way,
            seconds=seconds,
            skip_s=skip_s,
            environment=self.environment,
        )


def kinds(options: Options) -> tuple[Kind, ...]:
    grey = partial(data.grey_images, options.choose(20_000, 400))
    pictures = partial(data.jpegs, options.choose(5_000, 200), 96)
    light = {"train__model": LIGHT}
    tiny = {"train__model": LIGHT | {"in_channels": 1, "image_size": 28}} if options.quick else {}
    return (
        Kind(name="by-hand", data=grey, way="by hand", changes=tiny),
        Kind(name="torchrun", data=grey, way="torchrun", changes=tiny),
        Kind(name="ray-train", data=grey, changes=tiny),
        Kind(name="ray-loader", data=grey, loader="ray", changes=tiny),
        Kind(name="pictures-torch", data=pictures, changes=light),
        Kind(name="pictures-held", data=pictures, loader="ray", changes=light),
        Kind(
            name="pictures-streamed",
            data=pictures,
            loader="ray",
            changes=light,
            environment=SMALL_STORE,
        ),
    )


def measure(options: Options) -> list[Section]:
    ways = {kind.name: partial(kind.samples_per_s, options) for kind in kinds(options)}
    chosen = options.more.only or ways.keys()
    speeds = alternate({name: ways[name] for name in chosen}, options.rounds_or(5))

    def of(what: str, name: str, other: str, at_least: float) -> list[Row]:
        if not {name, other} <= speeds.keys():
            return []
        values = ratios(speeds[name], speeds[other])
        return [Row(what=what, unit="x", values=values, at_least=at_least)]

    return [
        Section(
            title="Ray Train and its loader, in training",
            rows=(
                *of("Ray Train over torchrun", "ray-train", "torchrun", 0.98),
                *of("Ray Train over DDP written by hand", "ray-train", "by-hand", 0.98),
                *of("Ray loader over torch loader, 28x28 raw", "ray-loader", "ray-train", 1.0),
                *of("the same, JPEGs that fit decoded", "pictures-held", "pictures-torch", 0.95),
                *of("the same, JPEGs streamed", "pictures-streamed", "pictures-torch", 0.95),
                *(
                    Row(what=f"`{name}`", unit="images/s", values=values)
                    for name, values in speeds.items()
                ),
            ),
            notes=(
                "`by-hand` (plain.py under torchrun), `torchrun` (ours there), `ray-train`, `ray-loader`: "
                "ResNet-18 on 28x28 grey pixels. The others: ShuffleNet 0.5 on JPEGs of 96x96. "
                "2 CPU workers with 1 thread each, global batch 128.",
            ),
        )
    ]


if __name__ == "__main__":
    main(measure, only={"nargs": "*", "metavar": "KIND", "help": "measure some kinds alone"})
