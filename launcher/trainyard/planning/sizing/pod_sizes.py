"""The sizes of Ray pods: CPUs, memory, disk and GPUs of the head and of worker nodes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from trainyard.platform import Head, Pool

MIB_PER_GIB = 1024


OBJECT_STORE_LIMIT_MIB = 200 * 10**9 // 2**20
"""The largest object store that Ray creates by default: 200 GB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodSize:
    """Resources of one Ray pod. For memory and disk, the request equals the limit."""

    cpu_request_milli: int
    cpu_limit_milli: int
    memory_mib: int
    disk_mib: int | None = None
    gpus: int = 0

    @property
    def logical_cpus(self) -> int:
        """Number of CPUs that Ray counts on the node: KubeRay passes the CPU limit, rounded up."""
        return ceil(self.cpu_limit_milli / 1000)

    @property
    def object_store_mib(self) -> int:
        """Size of Ray's object store in /dev/shm: 30 % of the memory, at most 200 GB."""
        return min(self.memory_mib * 3 // 10, OBJECT_STORE_LIMIT_MIB)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataGroup:
    """The Ray pods on which only the Ray loader runs; each fills a node."""

    pool: str
    nodes: int
    node: PodSize


def head_size(head: Head, workers: int) -> PodSize:
    """Return the size of the head pod, which grows with the number of workers."""
    more_milli = workers // head.workers_per_cpu * 1000
    return PodSize(
        cpu_request_milli=_milli(head.cpu_request) + more_milli,
        cpu_limit_milli=_milli(head.cpus) + more_milli,
        memory_mib=head.memory_gib * MIB_PER_GIB + head.memory_mib_per_worker * workers,
    )


def node_size(pool: Pool, per_node: int) -> PodSize:
    """Return the size of a pod with `per_node` workers: their share of a whole node.

    Memory and disk are whole MiB, rounded down.
    """
    share = per_node / pool.slots
    disk = pool.ephemeral_storage_gib
    return PodSize(
        cpu_request_milli=ceil(_milli(pool.cpu_request) * share),
        cpu_limit_milli=ceil(_milli(pool.cpus) * share),
        memory_mib=pool.memory_gib * MIB_PER_GIB * per_node // pool.slots,
        disk_mib=None if disk is None else disk * MIB_PER_GIB * per_node // pool.slots,
        gpus=per_node if pool.gpus_per_node else 0,
    )


def _milli(cpus: float) -> int:
    return round(cpus * 1000)
