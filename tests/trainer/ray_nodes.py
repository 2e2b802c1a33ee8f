"""A Ray cluster of three nodes on this machine: a head without CPUs, and two nodes for one worker each.

Prints the head's address; for each line on standard input it drains the node where a training worker is.
"""

from __future__ import annotations

import subprocess
import sys

import ray
from ray._private import state
from ray.cluster_utils import Cluster


def node_of_worker() -> str:
    """The node of the first living worker of Ray Train."""
    for actor in state.actors().values():
        if "RayTrainWorker" in actor["ActorClassName"] and actor["State"] == "ALIVE":
            return actor["Address"]["NodeID"]
    raise SystemExit("no training worker lives")


def main(scratch: str, deadline_s: str) -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "temp_dir": scratch},
    )
    for _ in range(2):
        cluster.add_node(num_cpus=2, object_store_memory=2**27)
    ray.init(address=cluster.address, logging_level="WARNING")
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        node = node_of_worker()
        drain = ["drain-node", "--address", cluster.address, "--node-id", node]
        drain += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
        drain += ["--deadline-remaining-seconds", deadline_s]
        subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *drain], check=True)
        print(f"drained {node}", flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
