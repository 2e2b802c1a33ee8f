"""A run on a real Ray whose nodes come and go: an elastic one trains on, another one waits for so long."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from attempts import (
    Attempts,
    check_metrics,
    committed,
    ray_config,
    read_json,
    read_records,
    reading,
    wait_for,
)

from trainyard_trainer.config.scaling import WORKER_RESOURCE

pytestmark = pytest.mark.slow

NODES = """
import sys
import ray
from ray._private import state
from ray.cluster_utils import Cluster

scratch, resource = sys.argv[1:]
node = {"include_dashboard": False, "object_store_memory": 2**27, "num_cpus": 2}
cluster = Cluster(
    initialize_head=True, head_node_args={**node, "num_cpus": 0, "temp_dir": f"{scratch}/ray"}
)
nodes = [cluster.add_node(**node, resources={resource: 1})]
ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
print("answer", cluster.address, flush=True)
for word in sys.stdin:
    answer = "done"
    if word.strip() == "add":
        nodes.append(cluster.add_node(**node, resources={resource: 1}))
    elif word.strip() == "remove":
        cluster.remove_node(nodes.pop(), allow_graceful=False)
    elif word.startswith("remove "):
        (lost,) = (node for node in nodes if node.node_id == word.split()[1])
        cluster.remove_node(lost, allow_graceful=False)
    else:
        names = [actor["ActorClassName"] for actor in state.actors().values()]
        answer = " ".join(name for name in names if "Coordinator" in name)
    print("answer", answer, flush=True)
ray.shutdown()
cluster.shutdown()
"""
RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
}


class Nodes:
    """Nodes of two CPUs, each with a place for one worker, and one of them at the beginning."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.address = self._answer()

    def tell(self, word: str) -> None:
        assert self._ask(word) == "done"

    def coordinators(self) -> str:
        """Classes of the actors that count nodes."""
        return self._ask("coordinators")

    def _ask(self, word: str) -> str:
        assert self.process.stdin
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        """Return the next answer. Ray's own messages may come before it."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("answer "):
                return line.removeprefix("answer ").strip()
        raise AssertionError("the nodes have ended")


@contextmanager
def running_nodes(attempts: Attempts) -> Iterator[Nodes]:
    with subprocess.Popen(
        [sys.executable, "-c", NODES, attempts.scratch, WORKER_RESOURCE],
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
            **RAY,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "TMPDIR": str(attempts.scratch),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield Nodes(process)
        assert process.stdin
        process.stdin.close()


@pytest.fixture
def attempts(fresh_attempts: Attempts) -> Attempts:
    """Start the processes of attempts as users start them: they join a Ray that is there already."""
    return fresh_attempts


@pytest.mark.timeout(600)
@pytest.mark.parametrize("loader", ["torch", "ray"])
def test_a_run_grows_when_a_node_comes_and_goes_on_when_it_is_lost(
    attempts: Attempts, loader: str
) -> None:
    config = ray_config(
        attempts,
        train__epochs=100_000,
        checkpoint__every_epochs=100_000,
        data__loader=loader,
        scaling__min_workers=1,
        scaling__cpus_per_worker=1,
        scaling__has_worker_places=True,
    )

    def workers() -> int:
        text = attempts.read(config, "workers.json")
        return len(read_json(config, "workers.json")["workers"]) if text else 0

    def starts() -> list[dict[str, Any]]:
        """What each worker group has started from."""
        return list({each["group"]: each for each in read_records(config, "starts.jsonl")}.values())

    with running_nodes(attempts) as nodes:
        driver = attempts.start(config, environment={**RAY, "RAY_ADDRESS": nodes.address})
        # Two CPUs hold two workers; places say that they are for one, and for data.
        assert wait_for(lambda: attempts.read(config, "metrics.jsonl"), 120)
        assert workers() == 1
        # Ray Train and Ray Data have found ours, and started none of their own.
        assert nodes.coordinators() == "Coordinator"

        nodes.tell("add")
        assert wait_for(lambda: workers() == 2, 150), attempts.read(config, "logs/attempt-1.log")
        # It has saved before it grew, and nowhere else.
        (_, grown) = starts()
        assert grown["step"] == grown["reached_step"] > 0
        assert len(committed(config)) == 1

        nodes.tell("remove")
        assert wait_for(lambda: workers() == 1, 150)
        records = len(read_records(config, "metrics.jsonl"))
        assert wait_for(lambda: len(read_records(config, "metrics.jsonl")) > records, 60)
        assert driver.poll() is None

        driver.terminate()
        output, _ = driver.communicate()
        assert driver.returncode == 1, output
    # One line of descent: no step is there twice, whoever computed it.
    steps = [record["step"] for record in read_records(config, "metrics.jsonl")]
    assert steps == sorted(set(steps))
    summary = read_json(config, "summary.json")
    assert (summary["attempts"], summary["workers"]) == (1, 1)


@pytest.mark.timeout(600)
def test_a_run_of_fixed_size_ends_its_attempt_when_nothing_replaces_a_lost_node(
    attempts: Attempts,
) -> None:
    config = ray_config(
        attempts,
        train__epochs=100_000,
        checkpoint__every_epochs=1,
        scaling__cpus_per_worker=1,
        scaling__has_worker_places=True,
        faults__replacement_timeout_s=30.0,
    )
    with running_nodes(attempts) as nodes:
        nodes.tell("add")
        driver = attempts.start(config, environment={**RAY, "RAY_ADDRESS": nodes.address})
        assert wait_for(lambda: committed(config), 150), attempts.read(config, "logs/attempt-1.log")
        nodes.tell("remove")
        output, _ = driver.communicate(timeout=200)
    assert driver.returncode == 1, output
    assert "error: the workers could not be restarted within" in output
    # Another attempt may go on.
    assert not attempts.read(config, "failed.json")


@pytest.mark.timeout(600)
def test_a_worker_whose_node_is_lost_is_replaced_on_another_and_no_step_is_repeated(
    attempts: Attempts,
) -> None:
    config = ray_config(
        attempts,
        train__epochs=60,
        checkpoint__every_epochs=60,
        scaling__cpus_per_worker=1,
        scaling__has_worker_places=True,
        faults__replace_workers=True,
    )
    with running_nodes(attempts) as nodes:
        nodes.tell("add")
        nodes.tell("add")
        driver = attempts.start(config, environment={**RAY, "RAY_ADDRESS": nodes.address})
        with reading(driver) as output:
            assert wait_for(lambda: attempts.read(config, "metrics.jsonl"), 150), output
            _, last = read_json(config, "workers.json")["workers"]
            nodes.tell(f"remove {last['ray_node']}")
            assert driver.wait() == 0, output
    assert any("worker 1 replaced within" in line for line in output), output
    _, new = read_json(config, "workers.json")["workers"]
    assert new["ray_node"] != last["ray_node"]
    assert {each["group"] for each in read_records(config, "starts.jsonl")} == {1}
    check_metrics(config, 60)
