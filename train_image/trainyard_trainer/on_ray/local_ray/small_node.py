"""A local Ray without the processes that a run on one machine does not need.

`ray.init` has no option for this. Each of these processes imports Ray, which takes CPU time while the run
starts:

* the dashboard's server, which starts even with `include_dashboard=False`, and for which `ray.init` waits
* the autoscaler's monitor
* the log monitor: a thread of the driver does its work instead

The agent of the node stays, because it exports the metrics.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray._private.node
import ray._private.worker
from ray._private.log_monitor import LogMonitor, is_proc_alive
from ray._raylet import GcsClient  # type: ignore[attr-defined]

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
