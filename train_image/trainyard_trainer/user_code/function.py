"""Run the training function that `TRAINYARD_CONFIG` names under Ray Train.

Started as `python -m trainyard_trainer.user_code.function`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import ray.data
import ray.train
import ray.train.torch

from trainyard_trainer.config.trainer_config import FunctionConfig, read_config
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.on_ray.ray_cluster import worker_resources
from trainyard_trainer.storage import open_filesystem
from trainyard_trainer.user_code.run_config import run_config

KEEP = 2
"""The number of checkpoints that stay, as for a built-in recipe by default."""


def main() -> int:
    config = read_config()
    assert isinstance(config, FunctionConfig)
    try:
        function = find(config.function)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    scaling = config.scaling
    result = ray.train.torch.TorchTrainer(
        function,
        train_loop_config=config.train_loop_config,
        scaling_config=ray.train.ScalingConfig(
            num_workers=scaling.num_workers,
            use_gpu=scaling.use_gpu,
            resources_per_worker=worker_resources(scaling),
        ),
        run_config=run_config(
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=KEEP),
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),
        ),
        datasets={
            name: table(path, config.storage.endpoint) for name, path in config.datasets.items()
        },
    ).fit()
    print(f"reported last: {result.metrics}", flush=True)
    return 0


def table(path: str, endpoint: str | None) -> ray.data.Dataset:
    """Return the rows of Parquet files. A bucket is at the run's S3 server, unless its URI names another."""
    if not path.startswith("s3://") or "?" in path:
        return ray.data.read_parquet(path)
    filesystem, path = open_filesystem(path, endpoint)
    return ray.data.read_parquet(path, filesystem=filesystem)


def find(name: str) -> Callable[..., Any]:
    """Import and return the callable of `module:callable`. Raises ConfigError if there is none."""
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"function = {name}: there is no module {error.name} in the folder that `code` names, "
                "nor in the image"
            ) from None
        raise
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigError(f"function = {name}: module {module} has no function {path}")
    return found


if __name__ == "__main__":
    sys.exit(main())
