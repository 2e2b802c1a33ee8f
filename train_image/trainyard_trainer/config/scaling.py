"""The numbers of an attempt: its workers and their resources, and the failures that it survives."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from trainyard_trainer.config.section import PositiveNumber, Section

DATA_LABELS = {"trainyard.io/nodes": "data"}
"""Ray labels of the nodes that a run has for its Ray loader alone."""

WORKER_RESOURCE = "trainyard_worker"
"""Counts the places for workers on a Ray node, where its CPUs alone would say something else."""

DATA_CPUS = 1
"""Logical CPUs beside the workers: without one, Ray Data waits for ever for a place to read."""


class Faults(Section):
    """How many failures a run survives."""

    worker_failures: NonNegativeInt = 3
    """Restarts of the worker group inside one attempt (Ray Train's `max_failures`)."""

    retries: NonNegativeInt = 2
    """New attempts on a new cluster after a failed one (RayJob's `backoffLimit`)."""

    collective_timeout_s: PositiveNumber = 900.0
    """How many seconds workers wait for each other, or for a sign of life of one, before they start over."""

    replacement_timeout_s: Annotated[PositiveNumber, Field(ge=5)] = 1800.0
    """How many seconds a run waits for a place for workers that were lost, before its next attempt starts on
    a new cluster. Longer than it takes to get a node; below 30 only where the platform keeps attempts apart
    (`job.separateAttempts`), as Kubernetes would put the new pods on the lost node."""


class Scaling(Section):
    """The numbers of the plan that the trainer needs."""

    num_workers: PositiveInt
    """Ray Train workers; of an elastic run the most."""

    min_workers: PositiveInt | None = None
    """Of an elastic run the fewest."""

    workers_per_node: PositiveInt = 1
    """Workers that an elastic run wins or loses together."""

    use_gpu: bool
    """Give each worker one GPU."""

    cpus_per_worker: PositiveInt
    """Logical CPUs of one worker, and its threads."""

    has_worker_places: bool = False
    """Nodes count places for workers as a resource of their own, and each worker takes one."""

    @property
    def is_elastic(self) -> bool:
        """Whether the run goes on with fewer workers, or more, while it trains."""
        return self.min_workers is not None

    @property
    def fewest(self) -> int:
        """Workers without which the run does not start."""
        return self.min_workers or self.num_workers

    @property
    def sizes(self) -> range:
        """All numbers of workers that the run may have."""
        return range(self.fewest, self.num_workers + 1, self.workers_per_node)
