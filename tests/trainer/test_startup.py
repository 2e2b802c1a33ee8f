"""Where the time of a start goes, from the beginning of an attempt to its first step."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from training import open_folder, small_config

from trainyard_trainer.attempt import without_ray
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.engine.measuring.startup_batches import StartupBatches
from trainyard_trainer.run_folder.log import Output
from trainyard_trainer.run_folder.measurements.startup import Startup

BATCH = Batch({"image": torch.zeros(1, 1, 2, 2, dtype=torch.uint8)}, torch.zeros(1))


class TwoBatches:
    def epoch(self, epoch: int) -> Iterator[Batch]:
        yield BATCH
        yield BATCH

    def state(self) -> dict[str, torch.Tensor]:
        return {"state": torch.ones(1)}


def test_each_phase_has_the_seconds_since_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    startup = Startup(began=100.0)
    for now, phase in ((101.5, "ray"), (104.0, "workers"), (999.0, "ray")):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        startup.reach(phase)
    assert startup.to_json() == {"began": 100.0, "ray": 1.5, "workers": 2.5}


def test_a_start_ends_when_the_second_batch_is_asked_for() -> None:
    startup = Startup(began=time.time())
    batches = StartupBatches(TwoBatches(), startup)
    epoch = batches.epoch(0)
    assert next(epoch) is BATCH
    assert list(startup.seconds) == ["first_batch"]
    assert list(epoch) == [BATCH]
    assert list(startup.seconds) == ["first_batch", "first_step"]
    assert batches.state() == TwoBatches().state()


def test_the_summary_tells_what_the_start_was_made_of(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    with Output(None) as output:
        without_ray.run(config, output, {})
    folder = open_folder(config)
    startup = json.loads(folder.read(folder.summary))["startup"]
    phases = ["lease", "prepare", "workers", "model", "first_batch", "first_step"]
    assert list(startup) == ["began", *phases]
    assert all(seconds >= 0 for seconds in startup.values())
