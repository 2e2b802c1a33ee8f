"""RunConfig and Platform -> Plan: all arithmetic of a run, and the reason for every number."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from launcher.config import RunConfig
from launcher.errors import ConfigError
from launcher.network import Fabric, Network, fabric_of
from launcher.platform import Platform, Pool
from launcher.queue import QUEUE_LABELS, System, queue_labels
from trainer.config import DATA_CPUS, BatchShare, Scaling, Storage, TrainerConfig, share_batch

MIB_PER_GIB = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Resources of one Ray pod; memory is request and limit alike."""

    cpu_request_milli: int
    cpu_limit_milli: int
    memory_mib: int
    gpus: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """One row of the plan: a number and where it comes from."""

    name: str
    value: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The numbers and names of one submission."""

    run: str
    namespace: str
    image: str
    pool: str
    gpu_resource: str | None
    nodes: int
    workers_per_node: int
    cpus_per_worker: int
    node: Size
    head: Size
    retries: int
    queue_system: System
    queue_labels: dict[str, str]
    fabric: Fabric
    pre_running_deadline_seconds: int
    ttl_seconds_after_finished: int
    keep_head_seconds_after_failure: int
    trainer: TrainerConfig

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def gpus(self) -> int:
        return self.nodes * self.node.gpus

    @property
    def has_staged_cleanup(self) -> bool:
        """Whether workers and head go at different times; Kueue refuses such rules."""
        return self.queue_system != "kueue"


def plan_run(run: RunConfig, platform: Platform, namespace: str) -> Plan:
    """Spread the workers of a run over equal Ray pods.

    16 GPUs at 8 per node -> 2 pods, 16 workers. Fewer workers than fill a node -> one pod with
    just their share of it. Raises ConfigError if the division leaves a rest.
    """
    pool = _pool(run, platform)
    workers = run.resources.gpus or run.resources.workers or 0
    nodes, per_node = _spread(workers, pool, "gpus" if run.resources.gpus else "workers")
    _require_shared_source(run)
    node = _node_size(pool, per_node)
    cpus_per_worker = _cpus_per_worker(pool, node, per_node)
    head = Size(
        cpu_request_milli=_milli(platform.head.cpu_request),
        cpu_limit_milli=_milli(platform.head.cpus),
        memory_mib=platform.head.memory_gib * MIB_PER_GIB
        + platform.head.memory_mib_per_worker * workers,
    )
    return Plan(
        run=run.name,
        namespace=namespace,
        image=run.image or platform.image,
        pool=pool.name,
        gpu_resource=pool.gpu_resource,
        nodes=nodes,
        workers_per_node=per_node,
        cpus_per_worker=cpus_per_worker,
        node=node,
        head=head,
        retries=run.faults.retries,
        queue_system=platform.queue.system,
        queue_labels=queue_labels(
            run.queue, platform.queue.system, platform.queue.name, run.name, namespace
        ),
        fabric=fabric_of(_network(run, pool), nodes),
        pre_running_deadline_seconds=platform.job.pre_running_deadline_seconds,
        ttl_seconds_after_finished=platform.job.ttl_seconds_after_finished,
        keep_head_seconds_after_failure=platform.job.keep_head_seconds_after_failure,
        trainer=trainer_config(
            run,
            Scaling(
                num_workers=workers,
                use_gpu=pool.gpus_per_node > 0,
                cpus_per_worker=cpus_per_worker,
            ),
            platform.storage,
        ),
    )


def trainer_config(run: RunConfig, scaling: Scaling, storage: Storage) -> TrainerConfig:
    """What of a run travels to the trainer. Raises ConfigError if workers cannot share a batch."""
    _batch_share(run, scaling.num_workers)
    return TrainerConfig(
        name=run.name,
        data=run.data,
        train=run.train,
        checkpoint=run.checkpoint,
        faults=run.faults,
        scaling=scaling,
        storage=storage,
    )


def _require_shared_source(run: RunConfig) -> None:
    """Raises ConfigError for data that lies beside the run file, where pods cannot see it."""
    for key in ("source", "valid_source"):
        path = getattr(run.data, key)
        if path and "/" in path and "://" not in path and not path.startswith("/"):
            raise ConfigError(
                f"data.{key} = {path} is a path of this machine, which a cluster's pods do not have",
                "Use an absolute path on the platform's storage, or s3://bucket/prefix.",
            )


def _pool(run: RunConfig, platform: Platform) -> Pool:
    """The pool the run names, else the default; it must have what the run asks for."""
    wants_gpus = run.resources.gpus is not None
    defaults = platform.default_pools
    pool = platform.pool(run.resources.pool or (defaults.gpus if wants_gpus else defaults.workers))
    if wants_gpus and not pool.gpus_per_node:
        raise ConfigError(
            f"resources.gpus = {run.resources.gpus}, but pool {pool.name} has no GPUs",
            "Use resources.workers, or a pool with gpusPerNode above 0.",
        )
    if not wants_gpus and pool.gpus_per_node:
        raise ConfigError(
            f"resources.workers = {run.resources.workers}, but pool {pool.name} has "
            f"{pool.gpus_per_node} GPUs per node that CPU workers would hold without using them",
            "Use resources.gpus, or a pool with workersPerNode.",
        )
    return pool


def _network(run: RunConfig, pool: Pool) -> Network | None:
    """The run's network, else the pool's. Raises ConfigError for RDMA between CPU workers."""
    network = run.network or pool.network
    if network is not None and network.device and not pool.gpus_per_node:
        raise ConfigError(
            f"network.preset = {network.preset}, but pool {pool.name} has no GPUs: CPU workers talk by gloo, "
            "over TCP",
            "Use preset tcp, or a pool with GPUs.",
        )
    return network


def _spread(workers: int, pool: Pool, resource: str) -> tuple[int, int]:
    """Nodes, and workers on each: a share of one node, or whole nodes."""
    if workers < pool.slots:
        return 1, workers
    nodes, rest = divmod(workers, pool.slots)
    if rest:
        below, above = nodes * pool.slots, (nodes + 1) * pool.slots
        raise ConfigError(
            f"resources.{resource} = {workers} cannot be spread over pool {pool.name} "
            f"with {count(pool.slots, pool.unit)} per node",
            f"{workers} = {nodes} x {pool.slots} + {rest}. Use {below} or {above}, "
            f"or fewer than {pool.slots} on one node.",
        )
    return nodes, pool.slots


def _batch_share(run: RunConfig, workers: int) -> BatchShare:
    try:
        return share_batch(run.train, workers)
    except ValueError as error:
        raise ConfigError(*str(error).splitlines()) from error


def _node_size(pool: Pool, per_node: int) -> Size:
    """A pod with its workers' share of a whole node; memory in whole MiB, rounded down."""
    share = per_node / pool.slots
    return Size(
        cpu_request_milli=ceil(_milli(pool.cpu_request) * share),
        cpu_limit_milli=ceil(_milli(pool.cpus) * share),
        memory_mib=pool.memory_gib * MIB_PER_GIB * per_node // pool.slots,
        gpus=per_node if pool.gpus_per_node else 0,
    )


def _cpus_per_worker(pool: Pool, node: Size, per_node: int) -> int:
    # KubeRay tells Ray the CPU limit, rounded up; Ray's CPUs are logical numbers.
    logical = ceil(node.cpu_limit_milli / 1000)
    cpus = (logical - DATA_CPUS) // per_node
    if cpus < 1:
        raise ConfigError(
            f"pool {pool.name} gives {count(logical, 'CPUs')} to a pod with "
            f"{count(per_node, 'workers')}; "
            f"each worker needs 1, and Ray Data {DATA_CPUS}",
            f"Give the pool at least {(per_node + DATA_CPUS) * pool.slots / per_node:g} cpus.",
        )
    return cpus


def _milli(cpus: float) -> int:
    return round(cpus * 1000)


def explain_plan(plan: Plan, run: RunConfig, platform: Platform) -> tuple[Reason, ...]:
    """The plan as rows: each number with the rule that made it."""
    pool, node, head = platform.pool(plan.pool), plan.node, plan.head
    workers, per_node = plan.workers, plan.workers_per_node
    batch = _batch_share(run, workers)
    unit = pool.unit
    chosen = "named by the run" if run.resources.pool else f"the platform's default for {unit}"
    share = "a whole node" if per_node == pool.slots else f"{per_node}/{pool.slots} of a node"
    rows = [
        ("pool", pool.name, f"{chosen}: {count(pool.slots, unit)} per node"),
        ("nodes", f"{plan.nodes}", f"{count(workers, unit)} / {per_node} per node, exactly"),
        ("workers", f"{workers}", "one per GPU" if pool.gpus_per_node else "resources.workers"),
    ]
    if pool.gpus_per_node:
        rows.append(("GPUs per node", f"{node.gpus}", f"{pool.gpu_resource}"))
    rows += [
        (
            "CPUs per node",
            f"{node.cpu_limit_milli / 1000:g}",
            f"{share}; {node.cpu_request_milli / 1000:g} requested",
        ),
        (
            "CPUs per worker",
            f"{plan.cpus_per_worker}",
            f"({ceil(node.cpu_limit_milli / 1000)} - {DATA_CPUS} for data) / {count(per_node, 'workers')}",
        ),
        ("memory per node", _mib(node.memory_mib), f"{share}, request = limit"),
        ("/dev/shm per node", _mib(node.memory_mib), "within the memory limit, set by KubeRay"),
        (
            "head",
            f"{head.cpu_limit_milli / 1000:g} CPUs, {_mib(head.memory_mib)}",
            f"{platform.head.memory_gib} GiB + {count(workers, 'workers')} x "
            f"{platform.head.memory_mib_per_worker} MiB; no worker runs there",
        ),
        (
            "batch per worker",
            f"{batch.samples}",
            f"global_batch_size {run.train.global_batch_size} / {count(workers, 'workers')}, exactly",
        ),
        (
            "passes per step",
            f"{batch.accumulation}",
            f"batch per worker / micro_batch_size {batch.micro_batch_size}, exactly",
        ),
        ("attempts", f"{run.faults.retries + 1}", f"1 + faults.retries {run.faults.retries}"),
        *_cluster_reasons(plan, run, pool),
        ("image", plan.image, "the run's" if run.image else "the platform's"),
        ("folder", f"{platform.storage.path}/{run.name}", "storage of the platform / name"),
    ]
    return tuple(Reason(name=name, value=value, why=why) for name, value, why in rows)


def _cluster_reasons(plan: Plan, run: RunConfig, pool: Pool) -> list[tuple[str, str, str]]:
    """Rows of queue, network and clean-up."""
    rows = []
    if plan.queue_system != "none":
        chosen = "named by the run" if run.queue and run.queue.name else "the platform's default"
        name = plan.queue_labels[QUEUE_LABELS[plan.queue_system]]
        rows.append(("queue", name, f"{chosen}; the cluster's queue system is {plan.queue_system}"))
    if network := run.network or pool.network:
        chosen = "named by the run" if run.network else f"pool {pool.name}'s"
        devices = ", ".join(f"{number} {name}" for name, number in plan.fabric.resources.items())
        alone = "no devices: one node talks to no other" if network.device else "no devices"
        per_node = f"{devices} per node" if devices else alone
        rows.append(("network", network.preset, f"{chosen}; {per_node}"))
    ttl, keep = plan.ttl_seconds_after_finished, plan.keep_head_seconds_after_failure
    if plan.has_staged_cleanup:
        rows += [
            ("after success", f"{ttl} s", "then the cluster goes: job.ttlSecondsAfterFinished"),
            (
                "after a failure",
                f"{keep} s",
                "for the head: job.keepHeadSecondsAfterFailure; workers go at once",
            ),
        ]
    else:
        rows.append(
            (
                "after the end",
                f"{ttl} s",
                f"then the cluster goes: {plan.queue_system} allows no stages",
            )
        )
    return rows


def count(number: int, unit: str) -> str:
    """`3 workers`, `1 worker`."""
    return f"{number} {unit.removesuffix('s') if number == 1 else unit}"


def _mib(mib: int) -> str:
    return f"{mib // MIB_PER_GIB} GiB" if mib % MIB_PER_GIB == 0 else f"{mib} MiB"
