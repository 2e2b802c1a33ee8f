"""Which processes the Ray of a run on this machine has, and how its workers start."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainyard_trainer.on_ray.local_ray import no_metrics_agent
from trainyard_trainer.on_ray.local_ray.mode import local_ray_mode
from trainyard_trainer.run_files.local_ray import LOCAL_RAY_VARIABLE

SCRIPT = """
import json, os, sys
from trainyard_trainer.on_ray.ray_cluster import ray_running
from trainyard_trainer.config.scaling import Scaling

import psutil, ray

def work():
    print("printed by a worker", flush=True)

with ray_running(Scaling(num_workers=1, use_gpu=False, cpus_per_worker=1)):
    children = psutil.Process().children(recursive=True)
    commands = [" ".join(process.cmdline()) for process in children]
    ray.get(ray.remote(work).remote())
json.dump(commands, open(sys.argv[1], "w"))
"""

LEFT_OUT = ("dashboard/dashboard.py", "autoscaler/_private/monitor.py", "log_monitor.py")

STAND_IN = "local_ray/no_metrics_agent.py"
"""The program that takes the place of the metrics agent, whose path is its first argument."""


def local_ray(found: Path, mode: str | None = None) -> tuple[list[str], str]:
    """Start a local Ray, run a task; return the command lines of its processes and what was printed."""
    variables = {} if mode is None else {"TRAINYARD_LOCAL_RAY": mode}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(found)],
        env={key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        | variables,
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    return (json.loads(found.read_text()) if found.exists() else []), output


@pytest.mark.ci
def test_a_small_ray_has_no_dashboard_and_no_monitors_and_still_shows_what_workers_print(
    tmp_path: Path,
) -> None:
    commands, output = local_ray(tmp_path / "found")
    # The command line of the raylet names all programs that it may start.
    others = [each for each in commands if "raylet/raylet" not in each]
    assert len(commands) == len(others) + 1, output
    # Nor does it start workers that nothing has asked for.
    left_out = (*LEFT_OUT, "ray::IDLE", "default_worker.py")
    assert not [each for each in others if any(name in each for name in left_out)]
    agents = [each for each in others if "dashboard/agent.py" in each]
    assert [STAND_IN in each for each in agents] == [True]
    assert "printed by a worker" in output


@pytest.mark.ci
def test_a_full_ray_is_that_of_ray_init(tmp_path: Path) -> None:
    commands, output = local_ray(tmp_path / "found", "full")
    for name in LEFT_OUT:
        assert any(name in each for each in commands), (name, output)
    assert not any(STAND_IN in each for each in commands)
    assert "printed by a worker" in output


@pytest.mark.ci
def test_an_unknown_mode_of_the_local_ray_is_refused(tmp_path: Path) -> None:
    _, output = local_ray(tmp_path / "found", "tiny")
    assert "TRAINYARD_LOCAL_RAY = tiny: must be one of" in output


@pytest.mark.parametrize(
    ("platform", "use_gpu", "mode"),
    [("linux", False, "forked"), ("linux", True, "small"), ("darwin", False, "small")],
)
def test_workers_are_forked_on_linux_without_gpus_unless_the_environment_says_otherwise(
    platform: str, use_gpu: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.delenv(LOCAL_RAY_VARIABLE, raising=False)
    assert local_ray_mode(use_gpu=use_gpu) == mode
    monkeypatch.setenv(LOCAL_RAY_VARIABLE, "full")
    assert local_ray_mode(use_gpu=use_gpu) == "full"


def test_the_stand_in_of_the_metrics_agent_writes_its_ports_and_ends_with_the_raylet(
    tmp_path: Path,
) -> None:
    from ray._raylet import wait_for_persisted_port

    node = "ab" * 28
    with subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", no_metrics_agent.__file__, "ray/dashboard/agent.py"),
            *(f"--session-dir={tmp_path}", f"--node-id={node}", "--head", "--grpc-port=0"),
        ],
        stdin=subprocess.PIPE,
    ) as agent:
        ports = [
            wait_for_persisted_port(str(tmp_path), node, service, timeout_ms=10_000)
            for service in no_metrics_agent.PORTS
        ]
        assert ports == [-1, -1, -1]
        assert agent.poll() is None
        assert agent.stdin is not None
        agent.stdin.close()  # as when the raylet ends
        assert agent.wait(10) == 0


def test_ray_starts_the_processes_that_are_left_out_by_the_same_methods_as_before() -> None:
    """If this fails, Ray has changed: read its `Node` and adapt `on_ray/local_ray/small_node.py`."""
    from ray import _raylet
    from ray._private import node, services, worker
    from ray._private.log_monitor import LogMonitor

    from trainyard_trainer.on_ray.local_ray.small_node import SmallNode

    replaced = ("start_monitor", "start_api_server", "start_log_monitor", "start_ray_processes")
    for name in replaced:
        ours, theirs = getattr(SmallNode, name), getattr(node.Node, name)
        assert (
            inspect.signature(ours).parameters.keys() == inspect.signature(theirs).parameters.keys()
        )
    assert "ray._private.node.Node(" in inspect.getsource(worker.init)
    raylet = inspect.getsource(services.start_raylet)
    for seam in (
        "_build_python_executable_command_memory_profileable(\n"
        "            ray_constants.PROCESS_TYPE_DASHBOARD_AGENT",
        "ray._private.utils.get_dashboard_dependency_error()",
    ):
        assert raylet.count(seam) == 1
    assert set(no_metrics_agent.PORTS) == {
        _raylet.METRICS_AGENT_PORT_NAME,
        _raylet.METRICS_EXPORT_PORT_NAME,
        _raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
    }
    # The thread repeats what the process of the log monitor does.
    loop = inspect.getsource(LogMonitor.run)
    for step in (
        "update_log_filenames",
        "open_closed_files",
        "check_log_files_and_publish_updates",
    ):
        assert loop.count(f"self.{step}()") == 1
