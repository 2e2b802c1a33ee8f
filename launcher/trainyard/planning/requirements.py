"""Choose pool, network and data nodes for a run, and check what the run requires of the platform.

Each function raises ConfigError if the platform does not meet the requirement.
"""

from __future__ import annotations

from trainyard.errors import ConfigError
from trainyard.planning.nodes.placement import require_alike, require_topology
from trainyard.planning.sizing.layout import asked_amount
from trainyard.planning.sizing.pod_sizes import DataGroup, node_size
from trainyard.platform import Platform, Pool
from trainyard.run_file.models import (
    BoostingRun,
    NetworkRun,
    OwnRecipeRun,
    RecipeRun,
    RunConfig,
)
from trainyard.run_file.network import (
    Network,
    merge_networks,
)
from trainyard_trainer.config.location import S3, is_remote
from trainyard_trainer.config.training.own_recipe import OwnData

SILENT_NODE_S = 50
"""How many seconds later than Ray Kubernetes may notice that a node is lost.

Kubernetes notices it after 50 s, and checks every 5 s. The chart sets 9 s for Ray.
"""


def is_on_this_machine(source: str) -> bool:
    """Return whether a data source is a relative path, which exists only on the user's machine.

    Other sources are the name of a built-in data set, a URL, or an absolute path.
    """
    return "/" in source and not source.startswith(("/", S3))


def require_shared_source(run: RecipeRun | OwnRecipeRun | BoostingRun) -> None:
    """Raise ConfigError for data at a relative path, which pods of a cluster cannot read."""
    data = run.data
    for key in ("source",) if isinstance(data, OwnData) else ("source", "valid_source"):
        path = getattr(data, key)
        # The name of a table needs no slash, since none comes with a package.
        is_name = isinstance(data, OwnData) and path is not None and "/" not in path
        if path and (is_name or is_on_this_machine(path)):
            raise ConfigError(
                f"data.{key} = {path} is a relative path, which pods of a cluster cannot read",
                "Use an absolute path on the platform's storage, or s3://bucket/prefix.",
            )


def require_shared_weights(run: NetworkRun) -> None:
    """Raise ConfigError for initial weights at a relative path, which pods of a cluster cannot read."""
    init = run.train.init
    if init and not init.path.startswith("/") and not is_remote(init.path):
        raise ConfigError(
            f"train.init.path = {init.path} is a relative path, which pods of a cluster cannot read",
            "Use an absolute path on the platform's storage or in a volume, s3://bucket/file, or hf://org/name.",
        )


def require_data_nodes(run: NetworkRun, pool: Pool, platform: Platform) -> None:
    """Raise ConfigError for `data.ray_nodes` that no Ray node matches: the run would wait forever."""
    wanted = run.data.ray_nodes
    if wanted is None or run.data.loader != "ray":
        return
    offered = platform.worker_group(pool.name).get("labels") or {}
    if not wanted.items() <= offered.items():
        raise ConfigError(
            f"data.ray_nodes = {wanted}: the Ray nodes of pool {pool.name} have the labels {offered}",
            "Use resources.data: {nodes: N}, which gives the Ray loader separate nodes.",
        )


def require_separate_attempts(run: RunConfig, platform: Platform) -> None:
    """Raise ConfigError if the next attempt's pods could be scheduled on the node that was just lost."""
    timeout_s = run.faults.replacement_timeout_s
    if timeout_s < SILENT_NODE_S and not platform.job.separate_attempts:
        raise ConfigError(
            f"faults.replacement_timeout_s = {timeout_s:g} is below {SILENT_NODE_S}: Kubernetes notices "
            "a lost node later than Ray, and until then could schedule the next attempt's pods there",
            f"Use {SILENT_NODE_S} or more, or set job.separateAttempts in the platform's values, which keeps "
            "the pods of an attempt off the nodes of the one before.",
        )


def require_no_spares_if_elastic(run: RunConfig) -> None:
    """Raise ConfigError for spare pods of an elastic run, whose workers would train in them."""
    if run.faults.spares and run.resources.is_elastic:
        raise ConfigError(
            f"faults.spares = {run.faults.spares}, and resources.{run.resources.unit} = {asked_amount(run)} "
            "is elastic: after the loss of a node it goes on with fewer workers",
            "Remove faults.spares, or use a fixed number of workers.",
        )


def choose_pools(run: RunConfig, platform: Platform) -> tuple[Pool, ...]:
    """Return the pools that the run names, the preferred one first, else the standing cluster's or the
    platform's default.

    Raises ConfigError if the run asks for GPUs and a pool has none, or the other way round, if pools of
    a list differ in more than their nodes, and if their workers cannot be packed as the run asks.
    """
    defaults = platform.default_pools
    default = defaults.gpus if run.resources.unit == "gpus" else defaults.workers
    if run.resources.cluster is not None and platform.standing_cluster is not None:
        default = platform.standing_cluster.pool
    pools = tuple(platform.pool(name) for name in run.resources.pools or (default,))
    for pool in pools:
        _require_unit(run, pool)
    require_alike(pools, platform)
    require_topology(run, pools, platform)
    return pools


def _require_unit(run: RunConfig, pool: Pool) -> None:
    """Raise ConfigError if a pool has no GPUs and the run asks for some, or the other way round."""
    asked = f"resources.{run.resources.unit} = {asked_amount(run)}"
    wants_gpus = run.resources.unit == "gpus"
    if wants_gpus and not pool.gpus_per_node:
        raise ConfigError(
            f"{asked}, but pool {pool.name} has no GPUs",
            "Use resources.workers, or a pool with gpusPerNode above 0.",
        )
    if not wants_gpus and pool.gpus_per_node:
        raise ConfigError(
            f"{asked}, but pool {pool.name} has "
            f"{pool.gpus_per_node} GPUs per node, which CPU workers would occupy without using them",
            "Use resources.gpus, or a pool with workersPerNode.",
        )


def choose_network(run: RunConfig, pool: Pool) -> Network | None:
    """Combine the run's network with the pool's. Raises ConfigError for RDMA between CPU workers."""
    network = merge_networks(run.network, pool.network)
    if network is not None and network.device_resource and not pool.gpus_per_node:
        raise ConfigError(
            f"network.preset = {network.preset}, but pool {pool.name} has no GPUs: CPU workers communicate "
            "with gloo over TCP",
            "Use preset tcp, or a pool with GPUs.",
        )
    return network


def choose_data_nodes(run: RunConfig, platform: Platform) -> DataGroup | None:
    """Return the nodes on which only the Ray loader runs, or None if the run asks for none."""
    asked = run.resources.data
    if asked is None:
        return None
    pool = platform.pool(asked.pool or platform.default_pools.workers, "resources.data.pool")
    if pool.gpus_per_node:
        raise ConfigError(
            f"resources.data.pool = {pool.name} has {pool.gpus_per_node} GPUs per node, which the "
            "Ray loader would occupy without using them",
            "Name a pool with workersPerNode.",
        )
    return DataGroup(pool=pool.name, nodes=asked.nodes, node=node_size(pool, pool.slots))
