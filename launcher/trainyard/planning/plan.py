"""RunConfig and Platform -> Plan: all arithmetic of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from math import ceil, lcm
from typing import Any

from trainyard.errors import ConfigError
from trainyard.platform import Head, Platform, Pool
from trainyard.run_file.code_archive import Overlay
from trainyard.run_file.models import (
    WORKER_LIMIT,
    BoostingRun,
    CommandRun,
    FunctionRun,
    RecipeRun,
    RunConfig,
    UserCodeRun,
)
from trainyard.run_file.network import (
    Network,
    NetworkRequirements,
    merge_networks,
    network_requirements,
)
from trainyard.run_file.queue import System, queue_labels
from trainyard_trainer.config.batch_share import BatchShare, share_batch
from trainyard_trainer.config.scaling import DATA_CPUS, DATA_LABELS, Scaling
from trainyard_trainer.config.storage import Storage
from trainyard_trainer.config.trainer_config import (
    AnyConfig,
    BoostingConfig,
    CommandConfig,
    FunctionConfig,
    TrainerConfig,
)

MIB_PER_GIB = 1024
OBJECT_STORE_LIMIT_MIB = 200 * 10**9 // 2**20
"""Ray makes no object store larger than 200 GB of itself."""
SILENT_NODE_S = 30
"""Kubernetes misses a silent node so much later than Ray: 50 s and a look every 5, Ray by the chart's 30."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodSize:
    """Resources of one Ray pod; memory and disk are request and limit alike."""

    cpu_request_milli: int
    cpu_limit_milli: int
    memory_mib: int
    disk_mib: int | None = None
    gpus: int = 0

    @property
    def logical_cpus(self) -> int:
        """What Ray counts: KubeRay tells it the CPU limit, rounded up."""
        return ceil(self.cpu_limit_milli / 1000)

    @property
    def object_store_mib(self) -> int:
        """Ray's own share for it: 30 % of the memory, within /dev/shm."""
        return min(self.memory_mib * 3 // 10, OBJECT_STORE_LIMIT_MIB)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataGroup:
    """Ray pods for the Ray loader alone; each fills a node."""

    pool: str
    nodes: int
    node: PodSize


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The numbers and names of one submission."""

    run: str
    namespace: str
    image: str
    pool: str
    gpu_resource: str | None
    nodes: int
    """Of an elastic run the most."""
    min_nodes: int
    """With which it starts."""
    workers_per_node: int
    cpus_per_worker: int
    node: PodSize
    head: PodSize
    data: DataGroup | None
    retries: int
    queue_system: System
    queue_labels: dict[str, str]
    network: Network | None
    """The run's `network` combined with its pool's."""
    network_requirements: NetworkRequirements
    """Environment variables and devices of each worker's container."""
    pre_running_deadline_seconds: int
    ttl_seconds_after_finished: int
    keep_head_seconds_after_failure: int
    trainer: AnyConfig
    launch: dict[str, Any]
    """See `launch_of`."""
    code: Overlay | None = None

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def gpus(self) -> int:
        return self.nodes * self.node.gpus

    @property
    def is_elastic(self) -> bool:
        """Its number of nodes changes while it goes on, by Ray's autoscaler."""
        return self.min_nodes < self.nodes

    @property
    def has_staged_cleanup(self) -> bool:
        """Whether workers and head go at different times: not with Kueue or autoscaling."""
        return self.queue_system != "kueue" and not self.is_elastic


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Workers spread over equal pods of a pool, exactly."""

    nodes: int
    per_node: int
    node: PodSize
    cpus_per_worker: int


def plan_run(
    run: RunConfig, platform: Platform, namespace: str, code: Overlay | None = None
) -> Plan:
    """Spread the workers of a run over equal Ray pods; `code` is what the run's folder of code packs to.

    16 GPUs at 8 per node -> 2 pods, 16 workers. Fewer workers than fill a node -> one pod with
    just their share of it. Raises ConfigError with the next possible numbers if the division
    leaves a rest, or if the workers cannot share a batch.
    """
    pool = _pool(run, platform)
    _require_apart(run, platform)
    if isinstance(run, RecipeRun | BoostingRun):
        _require_shared_source(run)
    if isinstance(run, RecipeRun):
        _require_data_nodes(run, pool, platform)
    data = _data_group(run, platform)
    low, high = _fits(run, pool, platform)
    network = _network(run, pool)
    uses_gpus = pool.gpus_per_node > 0
    return Plan(
        run=run.name,
        namespace=namespace,
        image=run.image or platform.image,
        pool=pool.name,
        gpu_resource=pool.gpu_resource,
        nodes=high.nodes,
        min_nodes=low.nodes,
        workers_per_node=high.per_node,
        cpus_per_worker=high.cpus_per_worker,
        node=high.node,
        head=_head_size(platform.head, high.nodes * high.per_node),
        data=data,
        retries=run.faults.retries,
        queue_system=platform.queue.system,
        queue_labels=queue_labels(
            run.queue, platform.queue.system, platform.queue.name, run.name, namespace
        ),
        network=network,
        network_requirements=network_requirements(network, high.nodes),
        pre_running_deadline_seconds=platform.job.pre_running_deadline_seconds,
        ttl_seconds_after_finished=platform.job.ttl_seconds_after_finished,
        keep_head_seconds_after_failure=platform.job.keep_head_seconds_after_failure,
        code=code,
        launch=launch_of(run, run.image or platform.image, pool, data),
        trainer=trainer_config(
            _reading_on_data_nodes(run) if isinstance(run, RecipeRun) and data is not None else run,
            Scaling(
                num_workers=high.nodes * high.per_node,
                min_workers=low.nodes * low.per_node if run.resources.is_elastic else None,
                workers_per_node=high.per_node if run.resources.is_elastic else 1,
                use_gpu=uses_gpus,
                cpus_per_worker=high.cpus_per_worker,
                # GPUs count places. CPUs do not: those that a node has for data would do for a worker more,
                # for which there is no memory.
                has_worker_places=not uses_gpus,
            ),
            platform.storage,
            code,
        ),
    )


def trainer_config(
    run: RunConfig, scaling: Scaling, storage: Storage, code: Overlay | None = None
) -> AnyConfig:
    """What of a run travels to the trainer. Raises ConfigError if workers cannot share a batch."""
    if isinstance(run, UserCodeRun):
        return _own_config(run, scaling, storage, code)
    common: dict[str, Any] = {
        "name": run.name,
        "faults": run.faults,
        "scaling": scaling,
        "storage": storage,
    }
    if isinstance(run, BoostingRun):
        return BoostingConfig(data=run.data, train=run.train, checkpoint=run.checkpoint, **common)
    assert isinstance(run, RecipeRun)
    for workers in scaling.sizes:
        batch_share(run, workers)
    return TrainerConfig(data=run.data, train=run.train, checkpoint=run.checkpoint, **common)


def _own_config(
    run: UserCodeRun, scaling: Scaling, storage: Storage, code: Overlay | None
) -> CommandConfig | FunctionConfig:
    common: dict[str, Any] = {
        "name": run.name,
        "code_sha256": None if code is None else code.sha256,
        "faults": run.faults,
        "scaling": scaling,
        "storage": storage,
    }
    if isinstance(run, FunctionRun):
        return FunctionConfig(
            function=run.function,
            train_loop_config=run.train_loop_config,
            datasets=run.datasets,
            **common,
        )
    assert isinstance(run, CommandRun)
    return CommandConfig(command=run.command, run_with=run.run_with, **common)


def launch_of(run: RunConfig, image: str, pool: Pool, data: DataGroup | None) -> dict[str, Any]:
    """What a run file says that the trainer is not told, with image and pools as they were chosen: together
    with the trainer's config it is a run file by which the same is planned again."""
    nodes = run.resources.data
    if nodes is not None and data is not None:
        nodes = nodes.model_copy(update={"pool": data.pool})
    resources = run.resources.model_copy(update={"pool": pool.name, "data": nodes})
    chosen = run.model_copy(update={"image": image, "resources": resources})
    return chosen.model_dump(mode="json", include={"image", "resources", "queue", "network"})


# What a run may ask for.


def is_on_this_machine(source: str) -> bool:
    """Whether a data source is a path beside the run file, and neither built in nor anywhere else."""
    return "/" in source and "://" not in source and not source.startswith("/")


def _require_shared_source(run: RecipeRun | BoostingRun) -> None:
    """Raises ConfigError for data that lies beside the run file, where pods cannot see it."""
    for key in ("source", "valid_source"):
        path = getattr(run.data, key)
        if path and is_on_this_machine(path):
            raise ConfigError(
                f"data.{key} = {path} is a path of this machine, which a cluster's pods do not have",
                "Use an absolute path on the platform's storage, or s3://bucket/prefix.",
            )


def _require_data_nodes(run: RecipeRun, pool: Pool, platform: Platform) -> None:
    """Raises ConfigError for labels that no Ray node of the run will have: it would wait for ever."""
    wanted = run.data.ray_nodes
    if wanted is None or run.data.loader != "ray":
        return
    offered = platform.worker_group(pool.name).get("labels") or {}
    if not wanted.items() <= offered.items():
        raise ConfigError(
            f"data.ray_nodes = {wanted}: the Ray nodes of pool {pool.name} have the labels {offered}",
            "Use resources.data: {nodes: N}, which gives the Ray loader nodes of its own.",
        )


def _require_apart(run: RunConfig, platform: Platform) -> None:
    """Raises ConfigError if the next attempt could start on the node that the one before has lost."""
    timeout_s = run.faults.replacement_timeout_s
    if timeout_s < SILENT_NODE_S and not platform.job.separate_attempts:
        raise ConfigError(
            f"faults.replacement_timeout_s = {timeout_s:g} is below {SILENT_NODE_S}: Kubernetes misses a "
            "lost node later than Ray, and until then it would put the next attempt's pods there",
            f"Use {SILENT_NODE_S} or more, or set job.separateAttempts in the platform's values, which keeps "
            "the pods of an attempt off the nodes of the one before.",
        )


def _pool(run: RunConfig, platform: Platform) -> Pool:
    """The pool the run names, else the default; it must have what the run asks for."""
    asked = f"resources.{run.resources.unit} = {_amount(run)}"
    wants_gpus = run.resources.unit == "gpus"
    defaults = platform.default_pools
    pool = platform.pool(run.resources.pool or (defaults.gpus if wants_gpus else defaults.workers))
    if wants_gpus and not pool.gpus_per_node:
        raise ConfigError(
            f"{asked}, but pool {pool.name} has no GPUs",
            "Use resources.workers, or a pool with gpusPerNode above 0.",
        )
    if not wants_gpus and pool.gpus_per_node:
        raise ConfigError(
            f"{asked}, but pool {pool.name} has "
            f"{pool.gpus_per_node} GPUs per node that CPU workers would hold without using them",
            "Use resources.gpus, or a pool with workersPerNode.",
        )
    return pool


def _network(run: RunConfig, pool: Pool) -> Network | None:
    """Combine the run's network with the pool's. Raises ConfigError for RDMA between CPU workers."""
    network = merge_networks(run.network, pool.network)
    if network is not None and network.device_resource and not pool.gpus_per_node:
        raise ConfigError(
            f"network.preset = {network.preset}, but pool {pool.name} has no GPUs: CPU workers communicate "
            "with gloo over TCP",
            "Use preset tcp, or a pool with GPUs.",
        )
    return network


def _data_group(run: RunConfig, platform: Platform) -> DataGroup | None:
    """Nodes for the Ray loader alone, if the run asks for some."""
    asked = run.resources.data
    if asked is None:
        return None
    pool = platform.pool(asked.pool or platform.default_pools.workers, "resources.data.pool")
    if pool.gpus_per_node:
        raise ConfigError(
            f"resources.data.pool = {pool.name} has {pool.gpus_per_node} GPUs per node, which the "
            "Ray loader would hold without using them",
            "Name a pool with workersPerNode.",
        )
    return DataGroup(pool=pool.name, nodes=asked.nodes, node=_node_size(pool, pool.slots))


def _reading_on_data_nodes(run: RecipeRun) -> RecipeRun:
    data = run.data.model_copy(update={"ray_nodes": DATA_LABELS})
    return run.model_copy(update={"data": data})


# From workers to pods.


def _fits(run: RunConfig, pool: Pool, platform: Platform) -> tuple[Fit, Fit]:
    """The fewest and the most pods of a run. Raises ConfigError with numbers that are possible."""
    ends = run.resources.bounds
    if not run.resources.is_elastic:
        try:
            fit = _fit(run, pool, ends[0])
        except ConfigError as error:
            hints = (*_next_possible(run, pool), *_other_pools(run, pool, platform))
            raise ConfigError(error.what, *error.details, *hints) from None
        return fit, fit
    assert isinstance(run, RecipeRun)  # no command is elastic
    sizes = range(ends[0], ends[1] + 1, pool.slots)
    try:
        for end in ends:
            if end % pool.slots:
                raise ConfigError(
                    f"resources.{run.resources.unit} = {_amount(run)}: an elastic run grows by whole "
                    f"nodes, and pool {pool.name} has {count(pool.slots, pool.unit)} per node"
                )
        fits = [_fit(run, pool, size) for size in sizes]
    except ConfigError as error:
        raise ConfigError(error.what, *error.details, *_possible_ranges(run, pool)) from None
    _require_autoscaling(run, platform)
    return fits[0], fits[-1]


def _require_autoscaling(run: RunConfig, platform: Platform) -> None:
    """Raises ConfigError where the cluster cannot add nodes to a run."""
    low, high = run.resources.bounds
    asked = f"resources.{run.resources.unit} = {_amount(run)} is elastic, which needs autoscaling"
    if platform.queue.system == "kueue":
        raise ConfigError(
            f"{asked}, and trainyard does not support that in a queue of Kueue, the platform's queue system",
            f"Use a fixed number: {low} or {high}.",
        )
    if platform.autoscaler is None:
        raise ConfigError(
            f"{asked}, and the platform says nothing of an autoscaler",
            "Set elastic.enabled in the values of a chart of today (`make platform`), or use a fixed "
            f"number: {low} or {high}.",
        )


def _fit(run: RunConfig, pool: Pool, workers: int) -> Fit:
    """So many workers on a pool. Raises ConfigError with the cause if they do not fit exactly."""
    nodes, per_node = _spread(run, pool, workers)
    node = _node_size(pool, per_node)
    if isinstance(run, RecipeRun):
        batch_share(run, workers)
    return Fit(
        nodes=nodes,
        per_node=per_node,
        node=node,
        cpus_per_worker=_cpus_per_worker(pool, node, per_node),
    )


def _spread(run: RunConfig, pool: Pool, workers: int) -> tuple[int, int]:
    """Nodes, and workers on each: a share of one node, or whole nodes."""
    if workers < pool.slots:
        return 1, workers
    nodes, rest = divmod(workers, pool.slots)
    if rest:
        raise ConfigError(
            f"resources.{run.resources.unit} = {workers} cannot be spread over pool {pool.name} "
            f"with {count(pool.slots, pool.unit)} per node: {workers} = {nodes} x {pool.slots} + {rest}"
        )
    return nodes, pool.slots


def batch_share(run: RecipeRun, workers: int) -> BatchShare:
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


# Numbers that are possible where the one asked for is not.


def _is_possible(run: RunConfig, pool: Pool, workers: int) -> bool:
    # Most numbers fall at the first look; the others are tried.
    if isinstance(run, RecipeRun) and run.train.global_batch_size % workers:
        return False
    try:
        _fit(run, pool, workers)
    except ConfigError:
        return False
    return True


def _first(run: RunConfig, pool: Pool, numbers: Iterable[int]) -> list[int]:
    return next(([number] for number in numbers if _is_possible(run, pool, number)), [])


def _next_possible(run: RunConfig, pool: Pool) -> list[str]:
    """A line with the next possible numbers below and above, all else being as it is."""
    asked, highest = run.resources.bounds[0], _most(run)
    found = [
        *_first(run, pool, range(min(asked, highest + 1) - 1, 0, -1)),
        *_first(run, pool, range(asked + 1, highest + 1)),
    ]
    batch = (
        f" with train.global_batch_size = {run.train.global_batch_size}"
        if isinstance(run, RecipeRun)
        else ""
    )
    if not found:
        return [f"No number is possible{batch} on pool {pool.name}."]
    numbers = " or ".join(str(number) for number in found[:-1] + [count(found[-1], pool.unit)])
    return [f"Use {numbers}{batch} on pool {pool.name}."]


def _most(run: RunConfig) -> int:
    """Of the workers that a run may have, as far as its batch goes."""
    if isinstance(run, RecipeRun):
        return min(run.train.global_batch_size, WORKER_LIMIT)
    return WORKER_LIMIT


def _other_pools(run: RunConfig, pool: Pool, platform: Platform) -> list[str]:
    """A line with the pools that hold just the number asked for, if there are some."""
    asked = run.resources.bounds[0]
    names = [
        other.name
        for other in platform.pools
        if other.unit == pool.unit and other != pool and _is_possible(run, other, asked)
    ]
    if not names:
        return []
    return [f"{count(asked, pool.unit)} fit pool {' and '.join(names)}: set resources.pool."]


def _possible_ranges(run: RecipeRun, pool: Pool) -> list[str]:
    """A line with the sizes that an elastic run may have, and with those that have no gap."""
    sizes = [
        size
        for size in range(pool.slots, _most(run) + 1, pool.slots)
        if _is_possible(run, pool, size)
    ]
    ranges = [
        f"{size_range[0]}:{size_range[-1]}"
        for _, group in groupby(enumerate(sizes), lambda item: item[1] - item[0] * pool.slots)
        if len(size_range := [size for _, size in group]) > 1
    ]
    low, high = (max(1, end // pool.slots) for end in run.resources.bounds)
    multiple = lcm(*range(low, high + 1)) * pool.slots
    numbers = ", ".join(str(size) for size in sizes) or "none"
    possible = (
        f"Possible sizes with train.global_batch_size = {run.train.global_batch_size}: {numbers}"
    )
    remedy = (
        f"use {' or '.join(ranges)}, which have no gap" if ranges else "no range is without a gap"
    )
    return [f"{possible}; {remedy}. {_batch_hint(multiple)}"]


def _batch_hint(multiple: int) -> str:
    if multiple > 10**6:
        return "Or use a shorter range."
    return f"Or use a multiple of {multiple} as batch, or a fixed number."


# Sizes.


def _head_size(head: Head, workers: int) -> PodSize:
    more_milli = workers // head.workers_per_cpu * 1000
    return PodSize(
        cpu_request_milli=_milli(head.cpu_request) + more_milli,
        cpu_limit_milli=_milli(head.cpus) + more_milli,
        memory_mib=head.memory_gib * MIB_PER_GIB + head.memory_mib_per_worker * workers,
    )


def _node_size(pool: Pool, per_node: int) -> PodSize:
    """A pod with its workers' share of a whole node; memory and disk in whole MiB, rounded down."""
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


# Words.


def _amount(run: RunConfig) -> str:
    low, high = run.resources.bounds
    return f"{low} to {high}" if run.resources.is_elastic else f"{low}"


def count(number: int, unit: str) -> str:
    """`3 workers`, `1 worker`."""
    return f"{number} {unit.removesuffix('s') if number == 1 else unit}"
