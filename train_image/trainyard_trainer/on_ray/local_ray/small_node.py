"""A local Ray without the processes that a run on one machine does not need.

`ray.init` has no option for this. Each of these processes imports Ray, which takes CPU time while the run
starts:

* the dashboard's server, which starts even with `include_dashboard=False`, and for which `ray.init` waits
* the autoscaler's monitor
* the log monitor: a thread of the driver does its work instead
* the node's metrics agent, for which the raylet waits: `no_metrics_agent` takes its place

The agent of runtime environments stays: Ray Train's processes have one.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray._private.node
import ray._private.services
import ray._private.utils
import ray._private.worker
from ray._private.log_monitor import LogMonitor, is_proc_alive
from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD_AGENT
from ray._raylet import GcsClient  # type: ignore[attr-defined]

NO_METRICS_AGENT = str(Path(__file__).with_name("no_metrics_agent.py"))
"""The program that takes the place of the metrics agent."""

RAYLET_S = 30.0
"""Seconds within which the raylet must have told the GCS that it is there; Ray's own value."""

RAYLET_LOOK_S = 0.02
"""Seconds between two looks for it."""

LOOK_S = 0.1
"""Seconds between two looks at the logs of workers that have written nothing; Ray's own value."""


class SmallNode(ray._private.node.Node):
    """Ray's node, without a dashboard, without an autoscaler, and with a thread as log monitor."""

    worker_program: str | None = None
    """The program that the raylet starts in place of Ray's worker; None for Ray's own."""

    _log_thread: threading.Thread | None = None

    def __init__(self, ray_params: Any, **options: Any) -> None:
        # It precedes `default_worker.py` in the command of a worker. The raylet leaves Ray's own program out
        # for a worker without a runtime environment, which it recognises by the name `setup_worker.py`.
        ray_params.update_if_absent(setup_worker_path=self.worker_program)
        super().__init__(ray_params, **options)

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        """Start the raylet, with a program that does nothing in place of its metrics agent."""
        with metrics_agent_replaced():
            super().start_raylet(*arguments, **options)

    def start_ray_processes(self) -> None:
        """Start the raylet, and wait until it is there. Ray itself looks for it once a second."""
        super().start_ray_processes()
        self._await_raylet()

    def _await_raylet(self) -> None:
        """Wait until the GCS knows the raylet; then, or after RAYLET_S seconds, Ray looks itself."""
        client, deadline = GcsClient(address=self.gcs_address), time.monotonic() + RAYLET_S
        while time.monotonic() < deadline and not client.get_all_node_info(timeout=RAYLET_S):
            time.sleep(RAYLET_LOOK_S)

    def start_monitor(self) -> None:
        """Start no autoscaler: a local Ray has one node."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Start no server of the dashboard: no process of a run asks it for anything."""

    def start_log_monitor(self) -> None:
        """Start the thread that sends what the workers write to the drivers, as Ray's log monitor does."""
        monitor = LogMonitor(
            self.node_ip_address,
            self.get_logs_dir_path(),
            GcsClient(address=self.gcs_address),
            is_proc_alive,
        )
        self._log_ended = threading.Event()
        self._log_thread = threading.Thread(
            target=_send_logs, args=(monitor, self._log_ended), name="log-monitor", daemon=True
        )
        self._log_thread.start()

    def kill_all_processes(self, *arguments: Any, **options: Any) -> None:
        """End the thread of the log monitor and all of Ray's processes."""
        if self._log_thread is not None:
            self._log_ended.set()
            self._log_thread.join()
            self._log_thread = None
        super().kill_all_processes(*arguments, **options)


def _send_logs(monitor: LogMonitor, ended: threading.Event) -> None:
    """Do what `LogMonitor.run` does, until the event is set."""
    while not ended.is_set():
        monitor.update_log_filenames()
        monitor.open_closed_files()
        if not monitor.check_log_files_and_publish_updates():
            ended.wait(LOOK_S)


@contextmanager
def metrics_agent_replaced() -> Iterator[None]:
    """Let a raylet that starts in this block start `no_metrics_agent` as its metrics agent.

    The path of Ray's own agent and its options become arguments of that program. The driver would also
    import what a dashboard needs, only to decide about one of these options.
    """
    services: Any = ray._private.services
    utils: Any = ray._private.utils
    build = services._build_python_executable_command_memory_profileable
    check = utils.get_dashboard_dependency_error

    def command(component: str, *arguments: Any, **options: Any) -> Any:
        if component == PROCESS_TYPE_DASHBOARD_AGENT:
            return [sys.executable, "-I", "-S", NO_METRICS_AGENT]
        return build(component, *arguments, **options)

    services._build_python_executable_command_memory_profileable = command
    utils.get_dashboard_dependency_error = lambda: None
    try:
        yield
    finally:
        services._build_python_executable_command_memory_profileable = build
        utils.get_dashboard_dependency_error = check


@contextmanager
def small_node(worker_program: str | None) -> Iterator[None]:
    """Let `ray.init` in this block start a SmallNode, whose raylet starts workers by `worker_program`.

    `ray.init` creates its node by the name that this function replaces. If another version of Ray does not,
    the assertion fails, and the test of this module with it.
    """
    original = ray._private.node.Node
    SmallNode.worker_program = worker_program
    ray._private.node.Node = SmallNode  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        ray._private.node.Node = original  # type: ignore[misc]
    node = ray._private.worker._global_node
    assert isinstance(node, SmallNode), f"ray.init of Ray {ray.__version__} starts another node"
