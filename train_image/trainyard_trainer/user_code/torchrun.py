"""Run torchrun on each Ray node, for training code that does not use Ray.

Started as `python -m trainyard_trainer.user_code.torchrun SCRIPT ARGUMENT...`.

Ray gives the places and starts one agent per node; the agents meet at the first of them (c10d). A worker that
fails is started again by torchrun, together with the others.
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

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trainyard_trainer.child_process import leashed
from trainyard_trainer.config.trainer_config import CommandConfig, read_config
from trainyard_trainer.on_ray.ray_cluster import worker_resources

PLACES_S = 300.0
"""How long all workers may take to find their places."""

WORDS = 40
"""Lines that are told once more of a torchrun that has failed."""

LEAVE_S = 15.0
"""How long they may take to leave after SIGTERM; who has started this program waits for a little longer."""


def main(arguments: Sequence[str]) -> int:
    config = read_config()
    assert isinstance(config, CommandConfig)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ray.init(log_to_driver=True)
    group = _places(config)
    table = placement_group_table(group)["bundles_to_node_id"]
    first = {node: bundle for bundle, node in sorted(table.items(), reverse=True)}
    workers = Counter(table.values())
    agents = {
        node: Agent.options(  # type: ignore[attr-defined]
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
    told = {name: value for name, value in os.environ.items() if name.startswith("TRAINYARD_")}
    told["OMP_NUM_THREADS"] = f"{config.scaling.cpus_per_worker}"
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
                # The workers, too, are killed with who started them, which is torchrun.
                "--no-python",
                *leashed([sys.executable, "-u", *arguments], parent=0),
            ],
            told,
        )
        for node, agent in agents.items()
    ]
    try:
        while running:
            # The first that fails ends the others, which would wait for it.
            ended, running = ray.wait(running)
            ending: Ending = ray.get(ended[0])
            if ending.code:
                # What Ray has not brought here yet would be lost with this program.
                print(
                    f"torchrun on {ending.node} ended with exit code {ending.code}; it said last:"
                )
                print("".join(ending.last_words), flush=True)
                return ending.code
    except SystemExit:
        ray.get([agent.stop.remote() for agent in agents.values()])
        ray.wait(running, num_returns=len(running), timeout=LEAVE_S)
        raise
    return 0


def _places(config: CommandConfig) -> PlacementGroup:
    """A place for each worker, as few nodes as they fit on. Raises ray.exceptions.GetTimeoutError."""
    each = worker_resources(config.scaling)
    group = placement_group([each] * config.scaling.num_workers, strategy="PACK")
    ray.get(group.ready(), timeout=PLACES_S)
    return group


@dataclass(frozen=True, slots=True)
class Ending:
    """How torchrun has ended on a node."""

    node: str
    code: int
    last_words: tuple[str, ...]


@ray.remote(runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}})
class Agent:
    """Runs torchrun on its node, which has the GPUs of all its workers."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def endpoint(self) -> str:
        """An address of this node with a port that is free."""
        with socket.socket() as found:
            found.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{found.getsockname()[1]}"

    def run(self, arguments: Sequence[str], told: Mapping[str, str]) -> Ending:
        """Say what it says, to its end."""
        words: deque[str] = deque(maxlen=WORDS)
        # torchrun would have the workers meet at its node's name, which no other pod can resolve.
        here = f"--local-addr={ray.util.get_node_ip_address()}"
        process = self._process = subprocess.Popen(
            leashed([sys.executable, "-m", "torch.distributed.run", here, *arguments]),
            env={**os.environ, **told},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            words.append(line)
        return Ending(ray.util.get_node_ip_address(), process.wait(), tuple(words))

    def stop(self) -> None:
        """SIGTERM for torchrun, which hands it on to its workers."""
        if self._process is not None:
            self._process.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
