"""Plan -> words: each number of a run with the rule that made it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from trainyard.planning.plan import Plan
from trainyard.planning.sizing.layout import batch_share, count
from trainyard.planning.sizing.pod_sizes import MIB_PER_GIB, OBJECT_STORE_LIMIT_MIB, PodSize
from trainyard.platform import Platform, Pool
from trainyard.run_file.code_archive import LIMIT_KIB
from trainyard.run_file.models import BoostingRun, RecipeRun, RunConfig
from trainyard.run_file.network import Network
from trainyard.run_file.queue import QUEUE_LABELS
from trainyard_trainer.config.scaling import DATA_CPUS
from trainyard_trainer.config.trainer_config import CommandConfig, FunctionConfig
from trainyard_trainer.run_files.sizes import size_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """One row of the plan: a number and where it comes from."""

    name: str
    value: str
    why: str


def explain_plan(plan: Plan, run: RunConfig, platform: Platform) -> tuple[Reason, ...]:
    """The plan as rows: each number with the rule that made it."""
    rows = [
        *_node_rows(plan, run, platform),
        *_head_rows(plan, platform),
        *_data_rows(plan, run, platform),
        *_rows_of_what_is_run(plan, run),
        ("attempts", f"{run.faults.retries + 1}", f"1 + faults.retries {run.faults.retries}"),
        *_cluster_reasons(plan, run, platform.pool(plan.pool)),
        ("image", plan.image, "the run's" if run.image else "the platform's"),
        ("folder", f"{platform.storage.path}/{run.name}", "storage of the platform / name"),
    ]
    return tuple(Reason(name=name, value=value, why=why) for name, value, why in rows)


Row = tuple[str, str, str]


def _rows_of_what_is_run(plan: Plan, run: RunConfig) -> list[Row]:
    if isinstance(run, RecipeRun):
        return _batch_rows(plan, run)
    if isinstance(run, BoostingRun):
        why = "each worker holds its share of the rows in memory, and tells sums over it"
        return [("rows per worker", f"1/{plan.workers}", why)]
    return _own_rows(plan)


def _node_rows(plan: Plan, run: RunConfig, platform: Platform) -> list[Row]:
    pool, node, per_node = platform.pool(plan.pool), plan.node, plan.workers_per_node
    unit, workers = pool.unit, plan.workers
    chosen = "named by the run" if run.resources.pool else f"the platform's default for {unit}"
    share = "a whole node" if per_node == pool.slots else f"{per_node}/{pool.slots} of a node"
    rows = [
        ("pool", pool.name, f"{chosen}: {count(pool.slots, unit)} per node"),
        ("nodes", f"{plan.nodes}", f"{count(workers, unit)} / {per_node} per node, exactly"),
        ("workers", f"{workers}", "one per GPU" if pool.gpus_per_node else "resources.workers"),
    ]
    if plan.is_elastic:
        fewest = plan.min_nodes * per_node
        rows[1] = (
            "nodes",
            f"{plan.min_nodes} to {plan.nodes}",
            f"{fewest} to {count(workers, unit)} / {per_node} per node, exactly; Ray's autoscaler "
            "adds those above the first",
        )
        rows[2] = ("workers", f"{fewest} to {workers}", rows[2][2])
    if pool.gpus_per_node:
        rows.append(("GPUs per node", f"{node.gpus}", _gpu_words(pool.gpu_resource or "")))
    rows += [
        (
            "CPUs per node",
            f"{node.cpu_limit_milli / 1000:g}",
            f"{share}; {node.cpu_request_milli / 1000:g} requested",
        ),
        (
            "CPUs per worker",
            f"{plan.cpus_per_worker}",
            f"({node.logical_cpus} - {DATA_CPUS} for data) / {count(per_node, 'workers')}",
        ),
        *_memory_rows(node, share),
        ("placement", *_placement(platform, plan.pool)),
    ]
    return rows


def _gpu_words(resource: str) -> str:
    if resource.startswith("nvidia.com/mig-"):
        return f"{resource}: parts of GPUs, which talk to each other through the host's memory"
    return resource


def _memory_rows(node: PodSize, share: str) -> list[Row]:
    rows = [
        ("memory per node", _mib(node.memory_mib), f"{share}, request = limit"),
        ("/dev/shm per node", _mib(node.memory_mib), "within the memory limit, set by KubeRay"),
        (
            "object store per node",
            _mib(node.object_store_mib),
            "200 GB, Ray's most"
            if node.object_store_mib == OBJECT_STORE_LIMIT_MIB
            else "30 % of the memory, as Ray itself takes; lies in /dev/shm",
        ),
    ]
    if node.disk_mib is not None:
        rows.append(("disk per node", _mib(node.disk_mib), f"{share}, request = limit"))
    return rows


def _placement(platform: Platform, pool: str) -> tuple[str, str]:
    """Node selector and tolerations of a pool's pods, in words."""
    spec = platform.worker_group(pool)["template"]["spec"]
    labels = ", ".join(f"{key}={value}" for key, value in (spec.get("nodeSelector") or {}).items())
    taints = [toleration.get("key") or "any taint" for toleration in spec.get("tolerations") or []]
    why = f"node selector of pool {pool}" if labels else f"pool {pool} has no node selector"
    return labels or "any node", why + (f"; tolerates {', '.join(taints)}" if taints else "")


def _head_rows(plan: Plan, platform: Platform) -> list[Row]:
    head, workers = platform.head, plan.workers
    rows = [
        (
            "head",
            f"{plan.head.cpu_limit_milli / 1000:g} CPUs, {_mib(plan.head.memory_mib)}",
            f"{head.cpus:g} CPUs + 1 per {head.workers_per_cpu} workers; {head.memory_gib} GiB + "
            f"{count(workers, 'workers')} x {head.memory_mib_per_worker} MiB; no worker runs there",
        )
    ]
    if plan.is_elastic and platform.autoscaler is not None:
        size = (platform.autoscaler.options.get("resources") or {}).get("limits") or {}
        sizes = ", ".join(f"{key} {value}" for key, value in size.items())
        rows.append(
            ("autoscaler", sizes or "KubeRay's default", "beside the head; adds and removes nodes")
        )
    return rows


def _data_rows(plan: Plan, run: RunConfig, platform: Platform) -> list[Row]:
    if plan.data is None:
        return []
    node, named = plan.data.node, run.resources.data is not None and run.resources.data.pool
    return [
        (
            "data nodes",
            f"{plan.data.nodes}",
            f"resources.data.nodes, whole nodes of pool {plan.data.pool}"
            f"{'' if named else ', the default for workers'}; the Ray loader reads there alone",
        ),
        (
            "size of a data node",
            f"{node.cpu_limit_milli / 1000:g} CPUs, {_mib(node.memory_mib)}",
            f"a whole node; {_mib(node.object_store_mib)} of the memory are object store",
        ),
        ("placement of data nodes", *_placement(platform, plan.data.pool)),
    ]


def _batch_rows(plan: Plan, run: RecipeRun) -> list[Row]:
    batch, fewest = batch_share(run, plan.workers), plan.min_nodes * plan.workers_per_node
    most = f" (at {fewest} workers {batch_share(run, fewest).samples})" if plan.is_elastic else ""
    passes = f" (at {fewest} {batch_share(run, fewest).accumulation})" if plan.is_elastic else ""
    return [
        (
            "batch per worker",
            f"{batch.samples}{most}",
            f"global_batch_size {run.train.global_batch_size} / {count(plan.workers, 'workers')}, exactly",
        ),
        (
            "passes per step",
            f"{batch.accumulation}{passes}",
            f"batch per worker / micro_batch_size {batch.micro_batch_size}, exactly",
        ),
    ]


def _own_rows(plan: Plan) -> list[Row]:
    config = plan.trainer
    if isinstance(config, FunctionConfig):
        rows = [("function", config.function, "called by Ray Train on each worker")]
    else:
        assert isinstance(config, CommandConfig)
        # The command stands last: in a column of its own it would push all others aside.
        where = "by torchrun, for each worker" if config.run_with else "once, on the head"
        rows = [("command", where, shlex.join(config.command))]
    if plan.code is not None:
        size = f"{size_text(plan.code.text_bytes)} of packed text"
        how = (
            f"{size}, and {LIMIT_KIB} KiB may travel: `submit` uploads it to the run's folder"
            if plan.code.is_uploaded
            else f"{size}, of {LIMIT_KIB} KiB that may travel"
        )
        rows.append(("code", plan.code.sha256[:8], how))
    return rows


def _cluster_reasons(plan: Plan, run: RunConfig, pool: Pool) -> list[tuple[str, str, str]]:
    """Rows of queue, network and clean-up."""
    rows = []
    if plan.queue_system != "none":
        chosen = "named by the run" if run.queue and run.queue.name else "the platform's default"
        name = plan.queue_labels[QUEUE_LABELS[plan.queue_system]]
        rows.append(("queue", name, f"{chosen}; the cluster's queue system is {plan.queue_system}"))
    if plan.network is not None:
        rows.append(_network_row(plan.network, plan, run, pool))
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
        reason = "autoscaling" if plan.is_elastic else plan.queue_system
        rows.append(
            (
                "after the end",
                f"{ttl} s",
                f"then the cluster goes: {reason} allows no stages",
            )
        )
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
    return f"{mib // MIB_PER_GIB} GiB" if mib % MIB_PER_GIB == 0 else f"{mib} MiB"
