"""The runs of the commands `drill` and `soak`, planned and rendered."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.cli.options import load_run_with_options, objects_with_warnings

if TYPE_CHECKING:
    from trainyard.drills.drill_run import DrillJob
    from trainyard.platform import Platform
    from trainyard.run_file.models import NetworkRun, RunConfig


def job_of(
    run_file: Path,
    settings: list[str],
    gpus: str | None,
    workers: str | None,
    word: str,
    platform: Platform,
    namespace: str,
) -> DrillJob:
    """Return the run file's run under a name for drills, planned and rendered."""
    from trainyard.drills.drill import SETTINGS, drill_name
    from trainyard.drills.drill_run import DrillJob
    from trainyard_trainer.config.trainer_config import TrainerConfig

    # Other runs have no such settings: they are refused for what they are.
    name = drill_name(
        recipe_of(load_run_with_options(run_file, settings, gpus, workers, None)).name, word
    )
    run = recipe_of(load_run_with_options(run_file, [*SETTINGS, *settings], gpus, workers, name))
    objects = objects_with_warnings(run, platform, namespace)
    assert isinstance(objects.plan.trainer, TrainerConfig)
    return DrillJob(run=name, config=objects.plan.trainer, rayjob=objects.job)


def recipe_of(run: RunConfig) -> NetworkRun:
    """Return the run as a recipe run with a RayCluster of its own.

    Raises ConfigError for user code, for gradient boosting, and for a run on a standing RayCluster.
    """
    from trainyard.errors import ConfigError
    from trainyard.run_file.models import BoostingRun, NetworkRun

    if not isinstance(run, NetworkRun):
        what = "trains no network" if isinstance(run, BoostingRun) else "runs user code"
        raise ConfigError(
            f"run {run.name} {what}: a drill compares weights, so it needs a recipe that trains a network",
            "Use examples/digits.yaml: the result says the same about the cluster.",
        )
    if run.resources.cluster is not None:
        raise ConfigError(
            f"resources.cluster = {run.resources.cluster}: a drill strikes pods, which other runs use there",
            "Leave resources.cluster out.",
        )
    return run
