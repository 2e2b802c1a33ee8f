"""What bounds a run follows from where its time went; its remedy is a line of a run file that holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from own_recipes import own_config
from training import small_config

from trainyard_trainer.config.trainer_config import BuiltInConfig
from trainyard_trainer.data.loading.user_dataset import UserDataInfo
from trainyard_trainer.data.prepared import DatasetInfo
from trainyard_trainer.report.verdict import Verdict, judge
from trainyard_trainer.run_folder.measurements.progress import TIME_PHASES

EPOCHS = 10
GPU = {"scaling__use_gpu": True, "train__precision": "fp32"}
FAST_GPU = GPU | {"train__precision": "auto"}


def judged(
    folder: Path, seconds: dict[str, float], *, encoding: str = "encoded", **changes: Any
) -> Verdict:
    """Of 100 s after start-up: what `seconds` does not name is spent on steps."""
    spent = dict.fromkeys(TIME_PHASES, 0.0) | {"startup": 5.0} | seconds
    spent["compute"] = 100 + spent["startup"] - sum(spent.values())
    images = DatasetInfo(
        source="digits", shape=(1, 8, 8), encoding=encoding, classes=("0",), mean=(0,), std=(1,)
    )
    config = small_config(folder, **{"train__epochs": EPOCHS, **changes})
    verdict = judge(spent, config, epochs=EPOCHS, images=images)
    assert f"{verdict.share:.0%}" in verdict.sentence
    return verdict


@pytest.mark.parametrize(
    ("seconds", "kind", "share"),
    [
        ({}, "compute-bound", 1.0),
        ({"startup": 99.9}, "compute-bound", 1.0),
        ({"startup": 100.0}, "start-up-bound", 0.5),
        ({"startup": 300.0, "data": 90.0}, "start-up-bound", 0.75),
        ({"data": 9.9}, "compute-bound", 0.901),
        ({"data": 10.0}, "input-bound", 0.1),
        ({"communication": 24.9}, "compute-bound", 0.751),
        ({"communication": 25.0}, "communication-bound", 0.25),
        ({"checkpoint": 4.9}, "compute-bound", 0.951),
        ({"checkpoint": 5.0}, "checkpoint-bound", 0.05),
        ({"validation": 32.9}, "compute-bound", 0.671),
        ({"validation": 33.0}, "validation-bound", 0.33),
        # Of several that are too much, the largest; what is not too much does not count.
        ({"data": 30.0, "communication": 40.0}, "communication-bound", 0.4),
        ({"data": 12.0, "communication": 24.0}, "input-bound", 0.12),
    ],
)
def test_the_largest_part_above_its_limit_bounds_a_run(
    tmp_path: Path, seconds: dict[str, float], kind: str, share: float
) -> None:
    verdict = judged(tmp_path, seconds)
    assert verdict.kind == kind
    assert verdict.share == pytest.approx(share)


@pytest.mark.parametrize(
    ("seconds", "changes", "remedy"),
    [
        # Start-up would be a tenth of 9 times its own length.
        ({"startup": 100.0}, {}, "train.epochs: 90"),
        # Who feeds: own processes first, then those of all nodes.
        ({"data": 50.0}, {}, "data.decode_workers: 1"),
        ({"data": 50.0}, {"scaling__cpus_per_worker": 4}, "data.loader: ray"),
        (
            {"data": 50.0},
            {"scaling__cpus_per_worker": 4, "data__decode_workers": 1},
            "data.decode_workers: 3",
        ),
        (
            {"data": 50.0},
            {"scaling__cpus_per_worker": 4, "encoding": "raw"},
            "data.decode_workers: 3",
        ),
        ({"data": 50.0}, {"data__loader": "ray"}, "data.loader: torch"),
        ({"communication": 50.0}, {}, "train.global_batch_size: 256"),
        # 8 times rarer: 1 %. Epochs take 10 s.
        ({"checkpoint": 8.0}, {}, "checkpoint.every_epochs: 8"),
        ({"checkpoint": 50.0}, {}, "checkpoint.every_epochs: 10"),
        ({"checkpoint": 8.0}, {"checkpoint__every_s": 2.5}, "checkpoint.every_s: 20"),
        (
            {"checkpoint": 8.0},
            {"checkpoint__every_samples": 100},
            "checkpoint.every_samples: 800",
        ),
        ({"checkpoint": 8.0}, {"checkpoint__every_epochs": 10}, "train.epochs: 80"),
        ({"validation": 50.0}, {}, "data.valid_share: 0.1"),
        ({}, {}, "resources.gpus: 1"),
        ({}, GPU, "train.precision: bf16"),
        ({}, FAST_GPU, "train.channels_last: true"),
        ({}, FAST_GPU | {"train__channels_last": True}, "train.compile: true"),
        (
            {},
            FAST_GPU | {"train__channels_last": True, "train__compile": True},
            "resources.gpus: 2",
        ),
    ],
)
def test_the_remedy_is_the_line_to_change(
    tmp_path: Path, seconds: dict[str, float], changes: dict[str, Any], remedy: str
) -> None:
    assert judged(tmp_path, seconds, **changes).remedy == remedy


@pytest.mark.parametrize(
    ("seconds", "changes"),
    [
        ({"startup": 100.0}, {}),
        ({"data": 50.0}, {}),
        ({"data": 50.0}, {"data__loader": "ray"}),
        ({"communication": 50.0}, {}),
        ({"checkpoint": 8.0}, {}),
        ({"checkpoint": 8.0}, {"checkpoint__every_s": 2.5}),
        ({"validation": 50.0}, {}),
        ({}, GPU),
        ({}, FAST_GPU),
    ],
)
def test_the_config_takes_the_remedy(
    tmp_path: Path, seconds: dict[str, float], changes: dict[str, Any]
) -> None:
    key, _, value = judged(tmp_path, seconds, **changes).remedy.partition(": ")
    config = small_config(tmp_path, **changes).model_dump()
    *sections, name = key.split(".")
    section = config
    for part in sections:
        section = section[part]
    assert name in section
    section[name] = {"true": True}.get(value, int(value) if value.isdecimal() else value)
    BuiltInConfig.model_validate(config)


@pytest.mark.parametrize("stream", [False, True])
def test_the_ray_loader_is_advised_if_all_cpus_of_the_workers_are_busy(
    tmp_path: Path, stream: bool
) -> None:
    seconds = dict.fromkeys(TIME_PHASES, 0.0) | {"data": 80.0, "compute": 20.0}
    config = own_config(tmp_path, workers=2)
    busy = config.data.model_copy(update={"decode_workers": 1, "stream": stream})
    config = config.model_copy(update={"data": busy})
    verdict = judge(seconds, config, epochs=EPOCHS, images=UserDataInfo(source="a:B"))
    assert verdict.remedy == "data.loader: ray"
