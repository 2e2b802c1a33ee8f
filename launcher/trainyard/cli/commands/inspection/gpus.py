"""The command `gpus`, and the list of nodes that `plan` needs too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainyard.cli.options import NAMESPACE, Context, Json, Namespace, open_cluster, print_json

if TYPE_CHECKING:
    from trainyard.planning.capacity.nodes import Node


def list_nodes(cluster: Any) -> tuple[Node, ...]:
    """Return all nodes of a cluster with the pods on them. Raises ClusterError without the right to list."""
    from trainyard.errors import ClusterError
    from trainyard.planning.capacity.nodes import nodes_of

    try:
        nodes = cluster.list("Node")
        pods = cluster.list(
            "Pod", fields="status.phase!=Succeeded,status.phase!=Failed", everywhere=True
        )
    except ClusterError as error:
        if error.reason != "Forbidden":
            raise
        raise ClusterError(
            "you have no right to list the nodes of the cluster and the pods of all namespaces",
            "Ask for a ClusterRole with list on nodes and pods (the chart's launcher.clusterRbac.create).",
            reason=error.reason,
        ) from error
    return nodes_of(nodes, pods)


def gpus(namespace: Namespace = NAMESPACE, context: Context = None, as_json: Json = False) -> None:
    """Show free and used GPUs of each pool and node, and the pods that use them."""
    from trainyard.cli import show
    from trainyard.planning.capacity.gpus import gpu_nodes, gpus_of_pools
    from trainyard.platform import CONFIG_MAP, platform_of_config_map

    cluster = open_cluster(namespace, context)
    found = list_nodes(cluster)
    config_map = cluster.get("ConfigMap", CONFIG_MAP)
    pools = {}
    if config_map is None:
        show.say(f"namespace {namespace} has no platform: the nodes are shown without pools")
    else:
        platform = platform_of_config_map(config_map, namespace)
        pools = {
            pool.name: (pool.gpu_resource, platform.worker_group(pool.name)["template"]["spec"])
            for pool in platform.pools
            if pool.gpu_resource is not None
        }
    rows = gpu_nodes(found, pools)
    sums = gpus_of_pools(rows)
    if as_json:
        print_json(
            {
                "pools": [
                    {"pool": pool, "resource": resource, **counts}
                    for pool, resource, counts in sums
                ],
                "nodes": [
                    {
                        "node": one.node,
                        "pools": list(one.pools),
                        "resource": one.resource,
                        "total": one.total,
                        "used": one.used,
                        "free": one.free,
                        "open": one.is_open,
                        "holders": [
                            {
                                "namespace": holder.namespace,
                                "pod": holder.pod,
                                "run": holder.run,
                                "gpus": int(holder.amount),
                                "phase": holder.phase,
                            }
                            for holder in one.holders
                        ],
                    }
                    for one in rows
                ],
            }
        )
        return
    show.gpu_tables(sums, rows)
    if not rows:
        show.say(f"none of the cluster's {len(found)} nodes offers GPUs")
