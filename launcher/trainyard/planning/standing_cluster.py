"""Runs on the platform's standing RayCluster: what it can give them, and what it refuses.

Its pods exist before the run, so a run file cannot change them.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainyard.errors import ConfigError
from trainyard.planning.sizing.layout import Layout, asked_amount, count, layout_for, whole_node
from trainyard.platform import Platform, Pool, StandingCluster
from trainyard.run_file.models import RunConfig
from trainyard.run_file.network import NetworkRequirements


def choose_standing_cluster(run: RunConfig, platform: Platform) -> StandingCluster | None:
    """Return the standing RayCluster that a run asks for; None for a RayCluster of its own.

    Raises ConfigError if the platform has no such cluster, or if the run asks for what its pods cannot give.
    """
    name, standing = run.resources.cluster, platform.standing_cluster
    if name is None:
        return None
    if standing is None:
        raise ConfigError(
            f"resources.cluster = {name} (--warm), and the platform has no standing cluster",
            "Set rayCluster.enabled in the chart's values and upgrade it (`make platform`), or leave "
            "resources.cluster out.",
        )
    if name != standing.name:
        raise ConfigError(
            f"resources.cluster = {name} is no standing cluster of the platform",
            f"Its standing cluster is {standing.name} (--warm).",
        )
    if problems := [*_problems(run, platform, standing)]:
        raise ConfigError(
            f"run {run.name} cannot use the standing cluster {standing.name}",
            *problems,
            "Remove it, or give the run a RayCluster of its own: leave --warm or resources.cluster out.",
        )
    return standing


def layout_on(run: RunConfig, pool: Pool, standing: StandingCluster) -> Layout:
    """Lay out the workers of a run on a standing cluster, whose nodes are used in whole by several runs.

    Raises ConfigError if the run needs more nodes than the cluster has.
    """
    workers, _ = run.resources.bounds
    layout = layout_for(run, pool, workers)
    if layout.nodes > standing.nodes:
        raise ConfigError(
            f"resources.{run.resources.unit} = {asked_amount(run)} needs {layout.nodes} nodes, and the "
            f"standing cluster {standing.name} has {standing.nodes} of pool {pool.name}, with "
            f"{count(pool.slots, pool.unit)} each",
            f"Use at most {places_of(standing, pool)}, raise rayCluster.replicas in the chart's values, or "
            "give the run a RayCluster of its own: leave --warm or resources.cluster out.",
        )
    node, cpus_per_worker = whole_node(pool)
    return Layout(
        nodes=layout.nodes, per_node=layout.per_node, node=node, cpus_per_worker=cpus_per_worker
    )


def places_of(standing: StandingCluster, pool: Pool) -> int:
    """Return for how many workers a standing cluster has places; `pool` is the pool of its workers."""
    return standing.nodes * pool.slots


def require_no_devices(network: NetworkRequirements, standing: StandingCluster) -> None:
    """Raise ConfigError for a network whose devices the pods of a standing cluster do not have."""
    if network.resources:
        devices = ", ".join(f"{number} {name}" for name, number in network.resources.items())
        raise ConfigError(
            f"the network of the run needs {devices} in each worker pod, which those of the standing cluster "
            f"{standing.name} do not have",
            "Use network.preset: tcp, at most the workers of one node, or a RayCluster of the run's own.",
        )


def _problems(run: RunConfig, platform: Platform, standing: StandingCluster) -> Iterator[str]:
    """Yield what a run asks for and the pods of the standing cluster cannot give."""
    if run.resources.pools and run.resources.pools != (standing.pool,):
        asked = ", ".join(run.resources.pools)
        yield f"resources.pool = {asked}: its workers are of pool {standing.pool}"
    if run.image not in (None, platform.image):
        yield f"image = {run.image}: its pods have the image {platform.image}"
    if run.secrets:
        yield f"secrets ({', '.join(run.secrets)}): its pods get no variables from Secrets"
    secret, of_platform = run.notify and run.notify.secret, platform.notify
    if secret and secret != (of_platform and of_platform.secret):
        yield f"notify.secret.name = {secret.name}: its head has only the Secret of the platform's notify"
    if run.faults.spares:
        yield f"faults.spares = {run.faults.spares}: its free places are the spare ones"
    if run.queue is not None:
        yield "queue: a queue system admits pods, and its pods exist already"
