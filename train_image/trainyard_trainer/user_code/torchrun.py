"""Run torchrun on each Ray node, for training code that does not use Ray.

Started as `trainyard_trainer.user_code.torchrun SCRIPT ARGUMENT...`.

A placement group reserves the resources of all workers, and an actor on each node runs torchrun there. The
first node hosts torchrun's rendezvous (c10d). If a worker fails, torchrun restarts all workers.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainyard_trainer.child_process import killed_with_parent
from trainyard_trainer.config.scaling import Scaling
from trainyard_trainer.config.trainer_config import CommandConfig, read_config
from trainyard_trainer.errors import RunError
from trainyard_trainer.on_ray.ray_cluster import worker_resources
from trainyard_trainer.run_files.programs.isolation import isolated
from trainyard_trainer.user_code.library_variables import library_variables

PLACEMENT_S = 300.0
"""The largest number of seconds that the placement group of all workers may take to become ready."""

LAST_LINES = 40
"""The number of lines of a failed torchrun's output that are printed again."""

STOP_S = 15.0
"""Seconds to wait for torchrun after SIGTERM. The parent of this program waits a little longer."""


def main(arguments: Sequence[str]) -> int:
    config = read_config()
    assert isinstance(config, CommandConfig)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ray.init(log_to_driver=True)
    try:
        group = reserve_workers(config.scaling)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return _wait_for_first_failure(*_start_torchrun(config, group, arguments))


def _start_torchrun(
    config: CommandConfig, group: PlacementGroup, arguments: Sequence[str]
) -> tuple[list[Any], list[ray.ObjectRef[TorchrunResult]]]:
    """Start torchrun on each node of the placement group; return the actors and the results to wait for."""
    table = placement_group_table(group)["bundles_to_node_id"]
    first = {node: bundle for bundle, node in sorted(table.items(), reverse=True)}
    workers = Counter(table.values())
    agents = {
        node: TorchrunActor.options(  # type: ignore[attr-defined]
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
            num_cpus=config.scaling.cpus_per_worker,
            num_gpus=1 if config.scaling.use_gpu else 0,
            max_concurrency=2,  # `stop` while it runs
        ).remote()
        for node, bundle in sorted(first.items(), key=lambda each: each[1])
    }
    host, *_ = agents.values()
    endpoint = ray.get(host.endpoint.remote())
    variables = {name: value for name, value in os.environ.items() if name.startswith("TRAINYARD_")}
    if python_path := os.environ.get("PYTHONPATH"):
        variables["PYTHONPATH"] = python_path
    running = [
        agent.run.remote(
            [
                f"--nnodes={len(agents)}",
                f"--nproc-per-node={workers[node]}",
                f"--rdzv-id={config.name}-{os.environ['TRAINYARD_ATTEMPT']}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={endpoint}",
                f"--rdzv-conf=is_host={int(agent is host)}",
                f"--max-restarts={config.faults.worker_failures}",
                # The workers are killed together with torchrun, which starts them.
                "--no-python",
                *killed_with_parent([sys.executable, "-u", *arguments], parent=0),
            ],
            variables
            | library_variables(
                ["torchrun"],
                os.environ,
                {
                    "workers_per_node": f"{workers[node]}",
                    "nodes": f"{len(agents)}",
                    "cpus_per_worker": f"{config.scaling.cpus_per_worker}",
                },
            ),
        )
        for node, agent in agents.items()
    ]
    return list(agents.values()), running


def _wait_for_first_failure(
    agents: Sequence[Any], running: list[ray.ObjectRef[TorchrunResult]]
) -> int:
    """Wait until torchrun has ended on every node or has failed on one; return the exit code of the program.

    On SIGTERM, stop torchrun on all nodes.
    """
    try:
        while running:
            # The first failure ends all: the others would wait for the failed one.
            ended, running = ray.wait(running)
            result: TorchrunResult = ray.get(ended[0])
            if result.code:
                # Ray may not have delivered these lines yet, and they would be lost with this program.
                print(
                    f"torchrun on {result.node} ended with exit code {result.code}; it said last:"
                )
                print("".join(result.last_lines), flush=True)
                return result.code
    except SystemExit:
        ray.get([agent.stop.remote() for agent in agents])
        ray.wait(running, num_returns=len(running), timeout=STOP_S)
        raise
    return 0


def reserve_workers(scaling: Scaling, limit_s: float = PLACEMENT_S) -> PlacementGroup:
    """Reserve the resources of all workers, on as few nodes as possible.

    Raises RunError if they are not free within `limit_s` seconds.
    """
    bundle = worker_resources(scaling)
    group = placement_group([bundle] * scaling.num_workers, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=limit_s)
    except GetTimeoutError as error:
        needed = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
        raise RunError(
            f"the resources of {scaling.num_workers} workers ({needed} each) were not free within "
            f"{limit_s:g} s. Check with `ray status` what else uses this Ray cluster."
        ) from error
    return group


@dataclass(frozen=True, slots=True)
class TorchrunResult:
    """The exit code and the last output of torchrun on a node."""

    node: str
    code: int
    last_lines: tuple[str, ...]


@ray.remote(runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}})
class TorchrunActor:
    """Runs torchrun on its node, which has the GPUs of all its workers."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def endpoint(self) -> str:
        """Return the address of this node with a free port."""
        with socket.socket() as found:
            found.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{found.getsockname()[1]}"

    def run(self, arguments: Sequence[str], variables: Mapping[str, str]) -> TorchrunResult:
        """Run torchrun and print its output, until it ends."""
        lines: deque[str] = deque(maxlen=LAST_LINES)
        # By default the workers would meet at the host name of the node, which no other pod can resolve.
        here = f"--local-addr={ray.util.get_node_ip_address()}"
        environment = {**os.environ, **variables}
        # Ray has added the user's code to PYTHONPATH, as it does for all its workers.
        paths = filter(None, (variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH")))
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        process = self._process = subprocess.Popen(
            killed_with_parent(isolated("torch.distributed.run", here, *arguments)),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        return TorchrunResult(ray.util.get_node_ip_address(), process.wait(), tuple(lines))

    def stop(self) -> None:
        """Send SIGTERM to torchrun, which passes it on to its workers."""
        if self._process is not None:
            self._process.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
