"""The layout of workers: how many equal pods, how many workers in each, and each worker's share."""

from __future__ import annotations

from dataclasses import dataclass

from trainyard.errors import ConfigError
from trainyard.planning.sizing.pod_sizes import PodSize, node_size
from trainyard.platform import Pool
from trainyard.run_file.models import (
    NetworkRun,
    RunConfig,
)
from trainyard_trainer.config.scaling import DATA_CPUS
from trainyard_trainer.config.training.batch_share import BatchShare, share_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The workers of a run, distributed equally over equal pods of a pool."""

    nodes: int
    """Number of pods."""
    per_node: int
    """Number of workers in each pod."""
    node: PodSize
    """Resources of each pod."""
    cpus_per_worker: int
    """Number of CPUs that Ray reserves for each worker."""


def layout_for(run: RunConfig, pool: Pool, workers: int) -> Layout:
    """Lay out a number of workers on a pool. Raises ConfigError if they do not fill whole nodes, or cannot
    divide a batch equally."""
    nodes, per_node = _distribute(run, pool, workers)
    node = node_size(pool, per_node)
    if isinstance(run, NetworkRun):
        batch_share(run, workers)
    return Layout(
        nodes=nodes,
        per_node=per_node,
        node=node,
        cpus_per_worker=_cpus_per_worker(pool, node, per_node),
    )


def whole_node(pool: Pool) -> tuple[PodSize, int]:
    """Return the size of a pod that fills a node of a pool, and the CPUs of each worker if it is full."""
    node = node_size(pool, pool.slots)
    return node, _cpus_per_worker(pool, node, pool.slots)


def _distribute(run: RunConfig, pool: Pool, workers: int) -> tuple[int, int]:
    """Return the number of nodes and of workers per node: a share of one node, or whole nodes."""
    if workers < pool.slots:
        return 1, workers
    nodes, rest = divmod(workers, pool.slots)
    if rest:
        raise ConfigError(
            f"resources.{run.resources.unit} = {workers} cannot be distributed over pool {pool.name} "
            f"with {count(pool.slots, pool.unit)} per node: {workers} = {nodes} x {pool.slots} + {rest}"
        )
    return nodes, pool.slots


def batch_share(run: NetworkRun, workers: int) -> BatchShare:
    """Divide the global batch over workers. Raises ConfigError with the nearest batch sizes that work."""
    try:
        return share_batch(run.train, workers)
    except ValueError as error:
        raise ConfigError(*str(error).splitlines()) from error


def _cpus_per_worker(pool: Pool, node: PodSize, per_node: int) -> int:
    cpus = (node.logical_cpus - DATA_CPUS) // per_node
    if cpus < 1:
        raise ConfigError(
            f"pool {pool.name} gives {count(node.logical_cpus, 'CPUs')} to a pod with "
            f"{count(per_node, 'workers')}; "
            f"each worker needs 1, and Ray Data {DATA_CPUS}",
            f"Give the pool at least {(per_node + DATA_CPUS) * pool.slots / per_node:g} cpus.",
        )
    return cpus


def asked_amount(run: RunConfig) -> str:
    """Return the number of GPUs or workers that the run file asks for: `16`, or `8 to 16`."""
    low, high = run.resources.bounds
    return f"{low} to {high}" if run.resources.is_elastic else f"{low}"


def count(number: int, unit: str) -> str:
    """Return a number with its unit, in the singular for 1: `3 workers`, `1 worker`."""
    return f"{number} {unit.removesuffix('s') if number == 1 else unit}"
