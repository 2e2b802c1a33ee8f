"""Run the training function that `TRAINYARD_CONFIG` names under Ray Train.

Started as `trainyard_trainer.user_code.function`, by a Python that can import the user's code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.data
import ray.train
import ray.train.torch

from trainyard_trainer.config.trainer_config import FunctionConfig, read_config
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.on_ray.ray_cluster import worker_resources
from trainyard_trainer.run_files.exit_codes import FAILED, SUCCEEDED
from trainyard_trainer.run_files.programs.code_imports import reserved_in
from trainyard_trainer.storage import open_filesystem
from trainyard_trainer.user_code.run_config import run_config
from trainyard_trainer.user_import import import_reference

CHECKPOINTS_TO_KEEP = 2
"""The number of checkpoints that Ray Train keeps: the default of built-in recipes."""


def main() -> int:
    """Train the function that the config names, and return the exit code."""
    config = read_config()
    assert isinstance(config, FunctionConfig)
    for name in reserved_in(Path.cwd()):
        print(
            f"{name} in the code of this run is not imported: Ray or torch need a module with the same name",
            flush=True,
        )
    try:
        function = import_function(config.function)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    try:
        result = train(function, config)
    except ray.train.WorkerGroupError as error:
        # It contains the workers' tracebacks; that of this process would only hide them.
        print(error, file=sys.stderr, flush=True)
        return FAILED
    print(f"last reported metrics: {result.metrics}", flush=True)
    return SUCCEEDED


def train(function: Callable[..., Any], config: FunctionConfig) -> ray.train.Result:
    """Train the function with TorchTrainer. Raises WorkerGroupError if it fails on a worker."""
    scaling = config.scaling
    return ray.train.torch.TorchTrainer(
        function,
        train_loop_config=config.train_loop_config,
        scaling_config=ray.train.ScalingConfig(
            num_workers=scaling.num_workers,
            use_gpu=scaling.use_gpu,
            resources_per_worker=worker_resources(scaling),
        ),
        run_config=run_config(
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=CHECKPOINTS_TO_KEEP),
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),
        ),
        datasets={
            name: read_dataset(path, config.storage.endpoint)
            for name, path in config.datasets.items()
        },
    ).fit()


def read_dataset(path: str, endpoint: str | None) -> ray.data.Dataset:
    """Return a data set of the rows of Parquet files.

    An s3:// URI is read from the run's S3 server, unless the URI itself names another server.
    """
    if not path.startswith("s3://") or "?" in path:
        return ray.data.read_parquet(path)
    filesystem, path = open_filesystem(path, endpoint)
    return ray.data.read_parquet(path, filesystem=filesystem)


def import_function(name: str) -> Callable[..., Any]:
    """Import the callable that `module:callable` names. Raises ConfigError if it does not exist."""
    found = import_reference(name, "function")
    if not callable(found):
        raise ConfigError(f"function = {name}: this is a {type(found).__name__}, not a function")
    return found


if __name__ == "__main__":
    sys.exit(main())
