"""What the driver sends to each worker of an attempt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trainyard_trainer.config.trainer_config import RecipeConfig, TrainerConfig
from trainyard_trainer.data.loading.rows import RunData
from trainyard_trainer.run_folder.measurements.startup import Startup


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingTask:
    """What each worker of an attempt receives; it is sent over the network."""

    config: TrainerConfig
    data: RunData
    attempt: int
    startup: Startup


class AnyTask(Protocol):
    """What the tasks of networks and of gradient boosting have in common."""

    @property
    def config(self) -> RecipeConfig: ...
    @property
    def attempt(self) -> int: ...
    @property
    def startup(self) -> Startup: ...
