"""Workers of a pod are forked if the variables of their job say so: each job has its own fork server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from attempts import Attempts, wait_for
from test_command import command_config

from trainyard_trainer.environment import JOB_CONFIG_VARIABLE
from trainyard_trainer.on_ray.local_ray import forked_workers
from trainyard_trainer.on_ray.local_ray.fork_client import (
    CONTEXT_OPTION,
    MARK_VARIABLE,
    TEMPLATE_VARIABLE,
)
from trainyard_trainer.on_ray.local_ray.forked_workers import CLIENT
from trainyard_trainer.on_ray.pod_ray import start_hook, template_process
from trainyard_trainer.on_ray.pod_ray.driver_client import DRIVERS
from trainyard_trainer.on_ray.pod_ray.fork_template import next_job
from trainyard_trainer.on_ray.pod_ray.start_hook import DRIVERS_JOB
from trainyard_trainer.on_ray.pod_ray.template_process import TemplateProcess
from trainyard_trainer.run_files.local_ray import LOCAL_RAY_VARIABLE
from trainyard_trainer.run_files.standing_cluster import RETRIES_VARIABLE

NO_PORT = 9
"""No program listens on it: the process waits until a client asks."""

WORKER = """
import json, os, sys
print(json.dumps({
    "parent": os.getppid(), "job": os.environ["RAY_JOB_ID"], "has_torch": "torch" in sys.modules,
}), flush=True)
sys.stdin.readline()
"""
"""A program of the name of Ray's own, since fork servers run no other."""


@pytest.fixture
def attempts(fresh_attempts: Attempts) -> Attempts:
    """Start the processes of attempts as users start them: their start is tested."""
    return fresh_attempts


class Pod:
    """Starts workers as the raylet of a pod does."""

    def __init__(self, template: TemplateProcess, folder: Path) -> None:
        self.template = template
        self.program = folder / "default_worker.py"
        self.program.write_text(WORKER)
        # Ray's own way to start a worker looks for its other program in the same folder.
        own = Path(ray.__file__).with_name("_private") / "workers/setup_worker.py"
        (folder / own.name).symlink_to(own)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, job: str, **variables: str) -> subprocess.Popen[str]:
        context = json.dumps({"env_vars": variables})
        environment = os.environ | {
            TEMPLATE_VARIABLE: self.template.address,
            "RAY_JOB_ID": job,
            "RAY_RAYLET_PID": str(os.getpid()),
        }
        process = subprocess.Popen(
            [
                sys.executable,
                CLIENT,
                str(self.program),
                CONTEXT_OPTION + context,
                "--language=PYTHON",
            ],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def worker(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """What a worker says of itself."""
        assert process.stdout is not None
        return json.loads(process.stdout.readline())

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()
        self.template.end()


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    started = Pod(TemplateProcess([DRIVERS, DRIVERS_JOB], NO_PORT), tmp_path)
    yield started
    started.end()


@pytest.mark.ci
def test_each_job_has_a_fork_server_that_has_imported_ray_as_its_worker(pod: Pod) -> None:
    marked = {MARK_VARIABLE: "1"}
    first = pod.worker(pod.start(DRIVERS_JOB, **marked))
    same = pod.worker(pod.start(DRIVERS_JOB, **marked))
    other = pod.worker(pod.start("09000000", **marked))
    assert [each["job"] for each in (first, same, other)] == [DRIVERS_JOB, DRIVERS_JOB, "09000000"]
    assert all(each["has_torch"] for each in (first, same, other))
    assert first["parent"] == same["parent"] != other["parent"]


@pytest.mark.ci
def test_a_worker_without_the_mark_of_its_job_starts_as_ray_starts_it(pod: Pod) -> None:
    process = pod.start(DRIVERS_JOB)
    assert pod.worker(process) == {"parent": os.getpid(), "job": DRIVERS_JOB, "has_torch": False}
    process.kill()
    assert process.stderr is not None
    assert "not forked" not in process.stderr.read()


@pytest.mark.ci
def test_without_the_process_that_forks_a_worker_starts_as_ray_starts_it_and_says_why(
    pod: Pod,
) -> None:
    forked = pod.start(DRIVERS_JOB, **{MARK_VARIABLE: "1"})
    assert pod.worker(forked)["has_torch"]
    pod.template.end()
    assert wait_for(lambda: forked.poll() is not None, 30)
    process = pod.start(DRIVERS_JOB, **{MARK_VARIABLE: "1"})
    assert not pod.worker(process)["has_torch"]
    process.kill()
    assert process.stderr is not None
    assert (
        "a worker process is not forked: the process that forks them has ended"
        in process.stderr.read()
    )


TELLS = "import os, time; print('driver', os.getppid(), flush=True); time.sleep({seconds})"
"""A program that tells the process id of its driver."""


def told_driver(line: str) -> int | None:
    """Return the process id in a line that `TELLS` prints; None for other lines."""
    match = re.fullmatch(r"driver (\d+)\n", line)
    return int(match[1]) if match else None


@pytest.mark.ci
def test_a_driver_is_forked_and_ends_as_its_client(pod: Pod, attempts: Attempts) -> None:
    of_ray = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
    environment = of_ray | {TEMPLATE_VARIABLE: pod.template.address, RETRIES_VARIABLE: "0"}

    def start(name: str, seconds: int) -> tuple[subprocess.Popen[str], int]:
        program = TELLS.format(seconds=seconds)
        client = attempts.start(
            command_config(attempts, sys.executable, "-c", program, name=name), environment
        )
        assert client.stdout is not None
        driver = next(filter(None, map(told_driver, client.stdout)))
        assert driver != client.pid
        return client, driver

    client, _ = start("succeeds", 0)
    output, _ = client.communicate()
    assert client.returncode == 0, output
    client, driver = start("killed", 600)
    client.kill()
    assert wait_for(lambda: not Path(f"/proc/{driver}").exists(), 30)
    pod.template.end()
    alone = command_config(attempts, "true", name="alone")
    assert "the driver is not forked: the process that forks them does not answer" in (
        attempts.finish(alone, environment=environment)
    )


def test_the_number_of_the_next_job_follows_ray() -> None:
    assert next_job(DRIVERS_JOB) == ray.JobID.from_int(3).hex()
    assert next_job("ff000000") == ray.JobID.from_int(256).hex()


def test_the_driver_of_a_recipe_marks_its_workers_unless_a_variable_forbids_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setenv(JOB_CONFIG_VARIABLE, '{"runtime_env": {"env_vars": {"A": "b"}}}')
    forked_workers.start({"OMP_NUM_THREADS": "4"}, use_gpu=False)
    assert "a library reads OMP_NUM_THREADS of `env`" in capsys.readouterr().out
    forked_workers.start({}, use_gpu=True)
    assert MARK_VARIABLE not in os.environ[JOB_CONFIG_VARIABLE]
    forked_workers.start({}, use_gpu=False)
    variables = json.loads(os.environ[JOB_CONFIG_VARIABLE])["runtime_env"]["env_vars"]
    assert variables == {"A": "b", MARK_VARIABLE: "1"}


def parameters(**values: Any) -> Any:
    """The parameters of a `ray start` that the hook looks at."""
    return SimpleNamespace(num_gpus=None, setup_worker_path=None, **values)


def test_a_head_starts_no_ray_client_server_and_no_autoscaler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(LOCAL_RAY_VARIABLE, raising=False)
    head = parameters(ray_client_server_port=10001, no_monitor=False)
    start_hook.prepare(head, True)
    assert (head.ray_client_server_port, head.no_monitor) == (None, True)
    assert head.setup_worker_path is None


def test_a_pod_forks_workers_only_if_the_chart_says_so_and_it_has_no_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(LOCAL_RAY_VARIABLE, raising=False)
    worker = parameters()
    start_hook.prepare(worker, False)
    assert worker.setup_worker_path is None
    monkeypatch.setenv(LOCAL_RAY_VARIABLE, "forked")
    worker.num_gpus = 1
    start_hook.prepare(worker, False)
    assert worker.setup_worker_path is None
    assert "worker processes are not forked: this pod has GPUs" in capsys.readouterr().out


@pytest.mark.ci
def test_a_process_that_must_not_fork_says_why_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = tmp_path / "fork_template.py"
    broken.write_text("import os, sys\nos.write(int(sys.argv[3]), b'it has 2 threads\\n')\n")
    monkeypatch.setattr(template_process, "PROGRAM", str(broken))
    template = TemplateProcess([DRIVERS, DRIVERS_JOB], NO_PORT)
    template.print_causes()
    told = capsys.readouterr().out
    assert "a worker process is not forked: it has 2 threads" in told
    assert "the process that forks workers has ended: exit code 0" in told
