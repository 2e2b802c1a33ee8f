"""Worker processes that are forked behave as those that Ray starts: each test has real processes.

The workers here are a small program of the name of Ray's own, since the server runs no other.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attempts import Attempts, ray_config, wait_for

from trainyard_trainer.on_ray.local_ray import forkable, forked_workers
from trainyard_trainer.on_ray.local_ray.fork_client import ADDRESS_VARIABLE
from trainyard_trainer.on_ray.local_ray.forked_workers import CLIENT, ForkServerProcess
from trainyard_trainer.run_files.local_ray import LOCAL_RAY_VARIABLE

FORKED = {LOCAL_RAY_VARIABLE: "forked"}

WORKER = """
import json, os, random, signal, sys, time
import numpy as np
def drawn():
    import ray
    return ray.NodeID.from_random().hex()
folders = [each for each in sys.path if "site-packages" not in each]
def told(number, frame):
    print("signal", number, flush=True)
    os._exit(5)
signal.signal(signal.SIGTERM, told)
print(json.dumps({
    "pid": os.getpid(), "argv": sys.argv, "folder": os.getcwd(), "path": folders[:2],
    "canary": os.environ.get("CANARY"), "name": __name__, "input": sys.stdin.readline(),
    "numbers": [random.random(), np.random.random(), drawn()], "is_ready": "torch" in sys.modules,
    "group": os.getpgid(0), "mask": [int(each) for each in signal.pthread_sigmask(0, [])],
}), flush=True)
if "wait" in sys.argv:
    time.sleep(600)
sys.exit(int(sys.argv[-1]))
"""


class Clients:
    """Starts clients of one fork server, as the raylet does."""

    def __init__(self, server: ForkServerProcess, folder: Path) -> None:
        self.server = server
        self.program = folder / "default_worker.py"
        self.program.write_text(WORKER)
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, CLIENT, str(self.program), *arguments],
            env=forked_workers.server_environment()
            | {ADDRESS_VARIABLE: self.server.address, "RAY_RAYLET_PID": str(os.getpid())}
            | variables,
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=os.setpgrp,
        )
        self.started.append(process)
        return process

    def worker(self, client: subprocess.Popen[str]) -> dict[str, Any]:
        """What the worker of a client says of itself."""
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write("from the raylet\n")
        client.stdin.flush()
        return json.loads(client.stdout.readline())

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Clients]:
    monkeypatch.setattr(forked_workers, "MODULES", ("numpy", "torch", "threadpoolctl"))
    server = ForkServerProcess()
    assert server.cause_of_absence() is None
    started = Clients(server, tmp_path)
    yield started
    started.end()
    server.end()


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.ci
def test_a_forked_worker_is_as_the_raylet_would_have_started_it(clients: Clients) -> None:
    context = {"env_vars": {"CANARY": "5$ (a) ${HOME}", "PYTHONPATH": "/of/the/run"}}
    options = (f"--serialized-runtime-env-context={json.dumps(context)}", "--language=PYTHON")
    client = clients.start("--worker", "wait", *options, "7")
    worker = clients.worker(client)
    numbers = worker.pop("numbers")
    pid = worker.pop("pid")
    assert pid != client.pid
    assert worker == {
        "argv": [str(clients.program), "--worker", "wait", "7"],
        "folder": str(clients.folder),
        "path": [str(clients.folder), "/of/the/run"],
        "canary": f"5$ (a) {os.environ['HOME']}",
        "name": "__main__",
        "input": "from the raylet\n",
        "is_ready": True,  # nothing was imported by the worker
        "group": client.pid,
        "mask": [],
    }
    # Another one has the numbers of another process, and the status is that of the worker.
    other = clients.start("3")
    assert not set(numbers) & set(clients.worker(other)["numbers"])
    assert other.wait(30) == 3


@pytest.mark.ci
def test_signals_reach_a_forked_worker_and_its_client_ends_as_it_does(clients: Clients) -> None:
    asked, killed, lost = (clients.start("wait", "0") for _ in range(3))
    workers = [clients.worker(client)["pid"] for client in (asked, killed, lost)]
    asked.terminate()
    assert asked.stdout is not None
    assert asked.stdout.readline() == f"signal {signal.SIGTERM:d}\n"
    assert asked.wait(30) == 5
    # The worker is killed: its client ends by the same signal.
    os.kill(workers[1], signal.SIGKILL)
    assert killed.wait(30) == -signal.SIGKILL
    # The client is killed: its worker is killed, too.
    lost.kill()
    assert wait_for(lambda: not is_running(workers[2]), 30)
    # The server goes on.
    assert clients.worker(clients.start("wait", "0"))["is_ready"]


@pytest.mark.ci
def test_without_the_fork_server_workers_end_and_new_ones_start_as_ray_starts_them(
    clients: Clients,
) -> None:
    client = clients.start("wait", "0")
    worker = clients.worker(client)["pid"]
    clients.server.end()
    assert client.wait(30) == -signal.SIGKILL
    assert wait_for(lambda: not is_running(worker), 30)
    alone = clients.start("wait", "0")
    told = clients.worker(alone)
    assert (told["pid"], told["is_ready"]) == (alone.pid, False)
    alone.kill()
    assert (
        "a worker process is not forked: the process that forks them has ended"
        in (alone.communicate()[1])
    )


@pytest.mark.ci
def test_a_worker_ends_with_the_raylet_that_has_started_it(clients: Clients) -> None:
    raylet = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    client = clients.start("wait", "0", RAY_RAYLET_PID=str(raylet.pid))
    worker = clients.worker(client)["pid"]
    raylet.kill()
    raylet.communicate()
    assert client.wait(30) == -signal.SIGKILL
    assert wait_for(lambda: not is_running(worker), 30)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "value"),
    [("OMP_STACKSIZE", "3M"), ("RAY_JOB_ID", "02000000"), ("RAY_DEDUP_LOGS", "0")],
)
def test_a_worker_with_variables_that_a_library_has_read_is_not_forked(
    clients: Clients, name: str, value: str
) -> None:
    client = clients.start("4", **{name: value})
    assert clients.worker(client)["pid"] == client.pid
    assert client.wait(30) == 4
    cause = f"{name} is read when a library is loaded, and differs"
    assert f"not forked: {cause}" in client.communicate()[1]
    assert next(clients.server.refusals()) == cause


DRAWN = """
import ray
from trainyard_trainer.on_ray.local_ray.forkable import cause_by_trial
assert cause_by_trial() is None
ray.NodeID.from_random()
assert "the same ids" in cause_by_trial()
"""


def test_a_process_that_has_drawn_an_id_of_ray_does_not_fork_workers() -> None:
    subprocess.run([sys.executable, "-c", DRAWN], check=True)


DRIVER = """
import subprocess, sys, time
from trainyard_trainer.on_ray.local_ray import forked_workers
forked_workers.MODULES = ("numpy", "torch", "threadpoolctl")
server = forked_workers.ForkServerProcess()
print(server.address, server.process.pid, server.cause_of_absence(), flush=True)
time.sleep(600)
"""


@pytest.mark.ci
def test_the_fork_server_and_its_workers_end_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    address, pid, cause = driver.stdout.readline().split()
    assert cause == "None"
    server = ForkServerProcess.__new__(ForkServerProcess)
    server.address = address
    clients = Clients(server, tmp_path)
    client = clients.start("wait", "0")
    worker = clients.worker(client)["pid"]
    driver.kill()
    driver.wait()
    assert wait_for(lambda: not is_running(int(pid)) and not is_running(worker), 30)
    assert client.wait(30) == -signal.SIGKILL
    clients.end()


def test_a_process_with_a_second_thread_does_not_fork() -> None:
    ended = threading.Event()
    threading.Thread(target=ended.wait).start()
    try:
        cause = forkable.cause_not_to_fork()
    finally:
        ended.set()
    assert cause is not None
    assert "threads: " in cause


def test_the_fork_server_that_cannot_import_its_modules_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forked_workers, "MODULES", ("no_such_module",))
    server = ForkServerProcess()
    cause = server.cause_of_absence()
    server.end()
    assert cause == "the process that forks them has failed: exit code 1"


@pytest.fixture
def attempts(fresh_attempts: Attempts) -> Attempts:
    """Start the processes of attempts as users start them: their start is tested."""
    return fresh_attempts


@pytest.mark.ci
def test_the_driver_says_why_workers_are_not_forked(attempts: Attempts) -> None:
    config = ray_config(attempts, 1, train__epochs=1, env={"OMP_STACKSIZE": "3M"})
    output = attempts.finish(config, environment=FORKED)
    assert "worker processes are not forked: a library reads OMP_STACKSIZE of `env`" in output


@pytest.mark.slow
def test_a_forked_worker_that_is_killed_is_replaced_by_another(attempts: Attempts) -> None:
    config = ray_config(attempts, train__epochs=15, checkpoint__keep=99)
    driver = attempts.start(config, FORKED)
    assert wait_for(lambda: attempts.read(config, "metrics.jsonl"), 240)
    workers = attempts.processes("RayTrainWorker")
    (server,) = {int(Path(f"/proc/{each}/stat").read_text().split()[3]) for each in workers}
    assert "fork_server.py" in Path(f"/proc/{server}/cmdline").read_text()
    os.kill(workers[0], signal.SIGKILL)
    output, _ = driver.communicate()
    assert driver.returncode == 0, output
    assert "not forked" not in output
    # The other worker of the group has seen that its peer was gone.
    failed = [json.loads(line) for line in attempts.read(config, "failures.jsonl").splitlines()]
    assert {failure["group"] for failure in failed} == {1}
    assert wait_for(lambda: not attempts.processes(), 60)
