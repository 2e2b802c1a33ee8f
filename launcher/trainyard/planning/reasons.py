"""Explain a plan: describe each of its numbers, and the rule from which the number follows."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from trainyard.labels import QUEUE_LABELS
from trainyard.planning.model_memory import memory_row
from trainyard.planning.nodes.affinity import shown_terms
from trainyard.planning.nodes.placement import packing_of, worker_group
from trainyard.planning.plan import Plan
from trainyard.planning.sizing.layout import batch_share, count
from trainyard.planning.sizing.pod_sizes import MIB_PER_GIB, OBJECT_STORE_LIMIT_MIB, PodSize
from trainyard.planning.standing_cluster import places_of
from trainyard.platform import Platform, Pool
from trainyard.run_file.code.code_archive import LIMIT_KIB
from trainyard.run_file.models import BoostingRun, NetworkRun, RunConfig
from trainyard.run_file.network import Network
from trainyard.run_file.queue import TopologyMode
from trainyard_trainer.config.limits import stop_after_s
from trainyard_trainer.config.scaling import DATA_CPUS
from trainyard_trainer.config.trainer_config import CommandConfig, FunctionConfig
from trainyard_trainer.run_files.sizes import size_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """One row of a printed plan."""

    name: str
    """What the row describes, such as `CPUs per node`."""
    value: str
    """The value, with its unit if it has one."""
    why: str
    """The rule, the key or the default from which the value follows."""


def explain_plan(plan: Plan, run: RunConfig, platform: Platform) -> tuple[Reason, ...]:
    """Return the rows that `trainyard plan` prints: each number of a plan, and why it has this value."""
    rows = [
        *(
            _standing_rows(plan, run, platform)
            if plan.standing_cluster is not None
            else [
                *_node_rows(plan, run, platform),
                *_head_rows(plan, platform),
                *_data_rows(plan, run, platform),
            ]
        ),
        *_training_rows(plan, run),
        *memory_row(
            run,
            [platform.pool(name) for name in plan.pools],
            plan.min_nodes * plan.workers_per_node,
        ),
        ("attempts", f"{run.faults.retries + 1}", f"1 + faults.retries {run.faults.retries}"),
        *_limit_rows(plan, run),
        *_cluster_rows(plan, run, platform.pool(plan.pool)),
        *_pod_rows(run, plan),
        *_volume_rows(plan),
        ("image", plan.image, "from the run file" if run.image else "the platform's default"),
        (
            "folder",
            f"{platform.storage.path}/{run.name}",
            "storage path of the platform / name of the run",
        ),
    ]
    return tuple(Reason(name=name, value=value, why=why) for name, value, why in rows)


Row = tuple[str, str, str]


def _training_rows(plan: Plan, run: RunConfig) -> list[Row]:
    """Return the rows that depend on the kind of run: batch, rows of data, or user code."""
    if isinstance(run, NetworkRun):
        return _batch_rows(plan, run)
    if isinstance(run, BoostingRun):
        why = "each worker keeps its share of the rows in memory, and exchanges only sums over them"
        return [("rows per worker", f"1/{plan.workers}", why)]
    return _user_code_rows(plan)


def _standing_rows(plan: Plan, run: RunConfig, platform: Platform) -> list[Row]:
    """Return the rows of a standing RayCluster, and of the share of it that the run takes."""
    standing, pool = platform.standing_cluster, platform.pool(plan.pool)
    assert standing is not None
    places = places_of(standing, pool)
    idle = (
        f"; idle for {standing.idle_minutes} min it deletes its worker pods, and a run brings them back"
        if standing.idle_minutes
        else ""
    )
    return [
        (
            "cluster",
            standing.name,
            f"resources.cluster; the standing RayCluster has {places} places: "
            f"{count(standing.nodes, 'nodes')} of pool {pool.name} with {count(pool.slots, pool.unit)} each"
            f"{idle}",
        ),
        (
            "workers",
            f"{plan.workers}",
            f"resources.{run.resources.unit}, one per place; they wait until {plan.workers} of the {places} "
            "places are free, first come, first served",
        ),
        (
            "CPUs per worker",
            f"{plan.cpus_per_worker}",
            f"({plan.node.logical_cpus} - {DATA_CPUS} for Ray Data) / {count(pool.slots, 'places')} per node",
        ),
    ]


def _node_rows(plan: Plan, run: RunConfig, platform: Platform) -> list[Row]:
    """Return the rows of pools, nodes and workers, of the size of a node, and of the placement."""
    pool, node, per_node = platform.pool(plan.pool), plan.node, plan.workers_per_node
    unit, workers = pool.unit, plan.workers
    chosen = "from the run file" if run.resources.pool else f"the platform's default for {unit}"
    if len(plan.pools) > 1:
        chosen = f"{_choice_of_pool(plan)}; {chosen}"
    share = "a whole node" if per_node == pool.slots else f"{per_node}/{pool.slots} of a node"
    rows = [
        ("pool", " or ".join(plan.pools), f"{chosen}; {count(pool.slots, unit)} per node"),
        ("nodes", f"{plan.nodes}", f"{count(workers, unit)} / {per_node} per node"),
        ("workers", f"{workers}", "one per GPU" if pool.gpus_per_node else "resources.workers"),
    ]
    if plan.is_elastic:
        fewest = plan.min_nodes * per_node
        rows[1] = (
            "nodes",
            f"{plan.min_nodes} to {plan.nodes}",
            f"{fewest} to {count(workers, unit)} / {per_node} per node; Ray's autoscaler adds nodes "
            f"to the first {plan.min_nodes}",
        )
        rows[2] = ("workers", f"{fewest} to {workers}", rows[2][2])
    if plan.spares:
        rows.insert(
            2,
            (
                "spare nodes",
                f"{plan.spares}",
                "faults.spares; workers start there when another node is lost",
            ),
        )
    if pool.gpus_per_node:
        rows.append(("GPUs per node", f"{node.gpus}", _gpu_reason(pool.gpu_resource or "")))
    rows += [
        (
            "CPUs per node",
            f"{node.cpu_limit_milli / 1000:g}",
            f"{share}; {node.cpu_request_milli / 1000:g} requested",
        ),
        (
            "CPUs per worker",
            f"{plan.cpus_per_worker}",
            f"({node.logical_cpus} - {DATA_CPUS} for Ray Data) / {count(per_node, 'workers')}",
        ),
        *_memory_rows(node, share),
        *(
            (
                f"placement{f' on {name}' if len(plan.pools) > 1 else ''}",
                *_placement(platform, name, plan.topology_mode),
            )
            for name in plan.pools
        ),
    ]
    return rows


def _gpu_reason(resource: str) -> str:
    """Return the name of the GPU resource, with a note if it stands for partitions of GPUs."""
    if resource.startswith("nvidia.com/mig-"):
        return f"{resource}: partitions of GPUs (MIG), which communicate through the host's memory"
    return resource


def _memory_rows(node: PodSize, share: str) -> list[Row]:
    """Return the rows of memory, shared memory, object store and disk of a node."""
    rows = [
        ("memory per node", _mib(node.memory_mib), f"{share}; the request equals the limit"),
        (
            "/dev/shm per node",
            _mib(node.memory_mib),
            "set by KubeRay to the memory limit, of which it is a part",
        ),
        (
            "object store per node",
            _mib(node.object_store_mib),
            "200 GB, the most that Ray takes by default"
            if node.object_store_mib == OBJECT_STORE_LIMIT_MIB
            else "30 % of the memory, Ray's default; it is stored in /dev/shm",
        ),
    ]
    if node.disk_mib is not None:
        rows.append(
            ("disk per node", _mib(node.disk_mib), f"{share}; the request equals the limit")
        )
    return rows


def _choice_of_pool(plan: Plan) -> str:
    """Return a text that says who chooses one of several pools."""
    if plan.queue_system == "kueue":
        return (
            "Kueue chooses one for all workers, the first flavor of its ClusterQueue that has room"
        )
    return f"the scheduler chooses one for each pod, and prefers {plan.pool}"


def _placement(
    platform: Platform, pool: str, topology_mode: TopologyMode | None = None
) -> tuple[str, str]:
    """Return the node labels that the pods of a pool require, and a text with tolerations and packing."""
    template = worker_group(platform, (pool,), topology_mode)["template"]
    labels = shown_terms(template["spec"])
    tolerations = template["spec"].get("tolerations") or []
    taints = [toleration.get("key") or "any taint" for toleration in tolerations]
    why = f"node selector of pool {pool}" if labels else f"pool {pool} has no node selector"
    if taints:
        why += f"; tolerates {', '.join(taints)}"
    if packing := packing_of(template):
        why += f"; {packing}"
    return labels or "any node", why


def _head_rows(plan: Plan, platform: Platform) -> list[Row]:
    """Return the rows of the head and, for an elastic run, of the autoscaler."""
    head, workers = platform.head, plan.workers
    rows = [
        (
            "head",
            f"{plan.head.cpu_limit_milli / 1000:g} CPUs, {_mib(plan.head.memory_mib)}",
            f"{head.cpus:g} CPUs + 1 per {head.workers_per_cpu} workers; {head.memory_gib} GiB + "
            f"{count(workers, 'workers')} x {head.memory_mib_per_worker} MiB; no worker runs on the head",
        )
    ]
    if plan.is_elastic and platform.autoscaler is not None:
        size = (platform.autoscaler.options.get("resources") or {}).get("limits") or {}
        sizes = ", ".join(f"{key} {value}" for key, value in size.items())
        rows.append(
            (
                "autoscaler",
                sizes or "KubeRay's default",
                "a container of the head pod; adds and removes nodes",
            )
        )
    return rows


def _data_rows(plan: Plan, run: RunConfig, platform: Platform) -> list[Row]:
    """Return the rows of the data nodes, if the run has any."""
    if plan.data is None:
        return []
    node, is_named = plan.data.node, run.resources.data is not None and run.resources.data.pool
    return [
        (
            "data nodes",
            f"{plan.data.nodes}",
            f"resources.data.nodes, whole nodes of pool {plan.data.pool}"
            f"{'' if is_named else ', the default for workers'}; the Ray loader runs only there",
        ),
        (
            "size of a data node",
            f"{node.cpu_limit_milli / 1000:g} CPUs, {_mib(node.memory_mib)}",
            f"a whole node; the object store takes {_mib(node.object_store_mib)} of the memory",
        ),
        ("placement of data nodes", *_placement(platform, plan.data.pool)),
    ]


def _batch_rows(plan: Plan, run: NetworkRun) -> list[Row]:
    """Return the rows of a worker's batch, which is largest with the fewest workers of an elastic run."""
    batch, fewest = batch_share(run, plan.workers), plan.min_nodes * plan.workers_per_node
    largest, passes = "", ""
    if plan.is_elastic:
        most = batch_share(run, fewest)
        largest = f" ({most.samples} with {count(fewest, 'workers')})"
        passes = f" ({most.accumulation} with {count(fewest, 'workers')})"
    return [
        (
            "batch per worker",
            f"{batch.samples}{largest}",
            f"global_batch_size {run.train.global_batch_size} / {count(plan.workers, 'workers')}",
        ),
        (
            "passes per step",
            f"{batch.accumulation}{passes}",
            f"batch per worker / micro_batch_size {batch.micro_batch_size}",
        ),
    ]


def _user_code_rows(plan: Plan) -> list[Row]:
    """Return the rows of the function or the command, and of the packed code."""
    config = plan.trainer
    if isinstance(config, FunctionConfig):
        rows = [("function", config.function, "called by Ray Train on each worker")]
    else:
        assert isinstance(config, CommandConfig)
        # The command is in the last column, because a long value would widen the column of values.
        where = "by torchrun, for each worker" if config.run_with else "once, on the head"
        rows = [("command", where, shlex.join(config.command))]
    if plan.code is not None:
        size = f"{size_text(plan.code.text_bytes)} of packed text"
        how = (
            f"{size}, more than the {LIMIT_KIB} KiB that a RayJob may hold: `submit` uploads the code to the "
            "run's folder"
            if plan.code.is_uploaded
            else f"{size} in the RayJob, which may hold {LIMIT_KIB} KiB"
        )
        rows.append(("code", plan.code.sha256[:8], how))
    return rows


def _cluster_rows(plan: Plan, run: RunConfig, pool: Pool) -> list[Row]:
    """Return the rows of queue, network and clean-up."""
    rows = []
    if plan.queue_system != "none":
        chosen = "from the run file" if run.queue and run.queue.name else "the platform's default"
        name = plan.queue_labels[QUEUE_LABELS[plan.queue_system]]
        rows.append(("queue", name, f"{chosen}; the cluster's queue system is {plan.queue_system}"))
    if plan.network is not None:
        rows.append(_network_row(plan.network, plan, run, pool))
    if plan.standing_cluster is not None:
        return rows
    ttl, keep = plan.ttl_seconds_after_finished, plan.keep_head_seconds_after_failure
    if plan.has_staged_cleanup:
        rows += [
            (
                "after success",
                f"{ttl} s",
                "until the cluster is deleted: job.ttlSecondsAfterFinished",
            ),
            (
                "after a failure",
                f"{keep} s",
                "until the head is deleted: job.keepHeadSecondsAfterFailure; workers are deleted at once",
            ),
        ]
    else:
        system: str = plan.queue_system
        if run.limits.max_run_s is not None:
            system = "limits.max_run_s"
        if plan.is_elastic:
            system = "autoscaling"
        rows.append(
            (
                "after the end",
                f"{ttl} s",
                f"until the cluster is deleted; with {system}, head and workers are deleted together",
            )
        )
    return rows


def _limit_rows(plan: Plan, run: RunConfig) -> list[Row]:
    """Return the rows of the deadlines: of the start of an attempt, and of the run if it has one."""
    is_own = run.limits.max_start_s is not None
    source = "limits.max_start_s" if is_own else "job.preRunningDeadlineSeconds of the platform"
    start_s, run_s = plan.pre_running_deadline_seconds, run.limits.max_run_s
    ready = "the standing cluster is" if plan.standing_cluster else "all pods are"
    rows = [("limit of the start", f"{start_s} s", f"until {ready} ready: {source}")]
    if run_s is not None:
        why = (
            f"limits.max_run_s, from the start of the driver over all attempts; after "
            f"{stop_after_s(run_s):g} s the workers save and the run stops"
        )
        if plan.active_deadline_seconds is not None:
            why += f"; KubeRay ends an attempt after {plan.active_deadline_seconds} s"
        rows.append(("limit of the run", f"{run_s} s", why))
    return rows


def _volume_rows(plan: Plan) -> list[Row]:
    """Return one row for each data volume: where the pods mount it, and what it is."""
    return [
        (
            f"volume {data.name}",
            str(data.mount["mountPath"]),
            f"{data.source}, {'read-only' if data.mount.get('readOnly') else 'writable'}; mounted by "
            "head and workers",
        )
        for data in plan.volumes
    ]


def _pod_rows(run: RunConfig, plan: Plan) -> list[Row]:
    """Return the rows of variables, secrets, labels and annotations that the run file sets.

    Names are in the last column, because a long value would widen the column of values.
    """
    rows = []
    if run.env:
        rows.append(
            ("variables", f"{len(run.env)}", f"of driver and workers: {', '.join(run.env)}")
        )
    if run.secrets:
        sources = (f"{name} from {each.name}/{each.key}" for name, each in run.secrets.items())
        rows.append(
            ("secrets", f"{len(run.secrets)}", f"variables by reference: {', '.join(sources)}")
        )
    if (notify := plan.trainer.notify) is not None:
        source = "from the platform" if run.notify is None else "from the run file"
        address = notify.url or (notify.secret and f"{notify.secret.name}/{notify.secret.key}")
        told = f"a message to {address} when it has ended" if notify.outcomes else "no messages"
        rows.append(("notify", ", ".join(notify.outcomes) or "nothing", f"{told}; {source}"))
    for name, pairs in (("labels", run.labels), ("annotations", run.annotations)):
        if pairs:
            keys = ", ".join(pairs)
            bearers = "the RayJob" if plan.standing_cluster else "the RayJob and its pods"
            rows.append((name, f"{len(pairs)}", f"of {bearers}: {keys}"))
    return rows


def _network_row(network: Network, plan: Plan, run: RunConfig, pool: Pool) -> Row:
    """Describe the network preset, which of run and pool set it, and the devices of a worker pod."""
    if run.network is None:
        source = f"from pool {pool.name}"
    elif pool.network is None:
        source = "from the run file"
    else:
        keys = ", ".join(run.network.model_dump(exclude_none=True))
        source = f"from pool {pool.name}, with {keys or 'no key'} of the run file"
    quantities = plan.network_requirements.resources.items()
    devices = ", ".join(f"{number} {name}" for name, number in quantities)
    if devices:
        devices = f"{devices} per node"
    elif network.device_resource is not None:
        devices = "no devices, because the run has one node"
    else:
        devices = "no devices"
    return "network", network.preset or "chosen by NCCL", f"{source}; {devices}"


def _mib(mib: int) -> str:
    """Return a size as text: in GiB if it is a whole number of GiB, else in MiB."""
    return f"{mib // MIB_PER_GIB} GiB" if mib % MIB_PER_GIB == 0 else f"{mib} MiB"
