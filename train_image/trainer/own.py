"""For training programs of your own: name, storage and failures of the run that starts them.

    from trainer.own import run_config
    trainer = ray.train.torch.TorchTrainer(train_func, run_config=run_config(), ...)

The run's folder is then Ray Train's own, too: a retry goes on from the last reported checkpoint, which
`ray.train.get_checkpoint()` gives.
"""

from __future__ import annotations

import os
from typing import Any

import ray.train


def run_config(**others: Any) -> ray.train.RunConfig:
    """`ray.train.RunConfig` of this run; what else it takes can be given. Outside of a run Ray's defaults."""
    if "TRAINYARD_RUN" in os.environ:
        failures = int(os.environ["TRAINYARD_WORKER_FAILURES"])
        others = {
            "name": os.environ["TRAINYARD_RUN"],
            "storage_path": os.environ["TRAINYARD_STORAGE"],
            "failure_config": ray.train.FailureConfig(max_failures=failures),
            **others,
        }
    return ray.train.RunConfig(**others)
