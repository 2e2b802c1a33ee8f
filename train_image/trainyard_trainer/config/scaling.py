"""The workers of an attempt with their resources, and the limits for failures."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from trainyard_trainer.config.section import PositiveNumber, Section

DATA_LABELS = {"trainyard.io/nodes": "data"}
"""The Ray labels of nodes that run only the data tasks of the Ray loader."""

WORKER_RESOURCE = "trainyard_worker"
"""A custom Ray resource: the number of workers that fit on a node, if its CPUs do not determine it."""

DATA_CPUS = 1
"""The number of logical CPUs in addition to those of the workers. Without one, Ray Data waits forever."""


class Faults(Section):
    """The limits for restarts and retries after failures."""

    worker_failures: NonNegativeInt = 3
    """The number of restarts of the worker group within one attempt (Ray Train's `max_failures`)."""

    retries: NonNegativeInt = 2
    """The number of further attempts after a failed one, each on a new cluster (RayJob's `backoffLimit`)."""

    collective_timeout_s: PositiveNumber = 900.0
    """The time in seconds after which an exchange between the workers fails that does not end. All workers
    restart then."""

    hang_timeout_s: Annotated[PositiveNumber, Field(ge=5)] = 180.0
    """The time in seconds after which the process of a worker is ended that hangs, so that it counts as lost:
    it does not answer, or it loads a batch or computes while others wait for it. The log names it after 30 s.
    A worker may wait for storage that fails for 2 minutes. With `train.compile`, at least
    `collective_timeout_s` counts."""

    replace_workers: bool = False
    """Whether lost workers are replaced while the other workers keep their state, so that no step is
    repeated. It works with DDP on CPUs, the torch loader and a fixed number of workers. Otherwise all workers
    restart from the last checkpoint. Each loss counts as a failure of the group."""

    keep_state: bool = False
    """Whether the newest state is also kept in the memory of the workers' nodes, so that a restart of all
    workers repeats a step or two in place of all steps since the last checkpoint, also if a node is lost. It
    works with each `train.strategy`, on CPUs and GPUs, and the torch loader. Keeping it takes at most a
    hundredth of the time of the steps. With `ddp` each node needs twice the memory of the weights and the
    optimizer's state, with `fsdp2` and `deepspeed` twice that of its workers' shards and optimizer state;
    with several nodes four times."""

    spares: NonNegativeInt = 0
    """The number of further pods like those of the workers. No worker trains there until a pod or a node is
    lost: its workers then start in a spare one, and need not wait for a new pod. A run on this machine, an
    elastic one and one on the standing cluster have none."""

    replacement_timeout_s: Annotated[PositiveNumber, Field(ge=5)] = 1800.0
    """The time in seconds that a run waits for resources to replace lost workers, before its next attempt
    starts on a new cluster. It must be longer than it takes to get a new node. Values below 30 need
    `job.separateAttempts` on the platform: otherwise Kubernetes may place the new pods on the lost node."""


RECIPE_FAULTS = ("collective_timeout_s", "hang_timeout_s", "replace_workers", "keep_state")
"""The keys of `faults` that only recipes have: the trainer does not know the loop of other programs."""


class Scaling(Section):
    """The numbers of the plan that the trainer needs: workers and their resources."""

    num_workers: PositiveInt
    """The number of Ray Train workers; for an elastic run, the maximum."""

    min_workers: PositiveInt | None = None
    """The minimum number of workers of an elastic run; null for a run with a fixed number."""

    workers_per_node: PositiveInt = 1
    """The number of workers on one node. An elastic run grows and shrinks by this number."""

    use_gpu: bool
    """Whether each worker gets one GPU."""

    cpus_per_worker: PositiveInt
    """The number of logical CPUs and of threads of one worker."""

    has_worker_places: bool = False
    """Whether nodes have the custom Ray resource `trainyard_worker`, of which each worker takes one."""

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers may change while the run trains."""
        return self.min_workers is not None

    @property
    def fewest(self) -> int:
        """The minimum number of workers with which the run starts."""
        return self.min_workers or self.num_workers

    @property
    def sizes(self) -> range:
        """All numbers of workers with which the run may train."""
        return range(self.fewest, self.num_workers + 1, self.workers_per_node)

    @property
    def cpus(self) -> int:
        """The number of logical CPUs that a Ray needs for the workers and for data."""
        return self.fewest * self.cpus_per_worker + DATA_CPUS
