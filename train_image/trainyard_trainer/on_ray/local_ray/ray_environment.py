"""The environment variables with which Ray is imported and started; values that are set already win.

This module does not import Ray, which reads most of them when it is imported.
"""

from __future__ import annotations

import os

from trainyard_trainer.on_ray.local_ray.mode import LocalRayMode

RAY_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_COLOR_PREFIX": "0",
    # Suppress log lines that are unrelated to the run; some appear each second or each epoch.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "|".join(
        (
            "Failed to query Ray Train Controller actor state",
            "'PreemptionWatcher' .* has constructor arguments in the object store",
            r"(Starting execution|Execution plan) of Dataset",
            r"Dataset \S+ execution finished",
            "Progress bars disabled",
            r"ExecutionOptions.exclude_resources|self\.exclude_resources",
        )
    ),
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    # Keep idle processes for the data tasks of the next epoch: the imports of a new process take seconds.
    # The default is 1 s. The value is read where Ray is started, which on a cluster is in the pods.
    "RAY_idle_worker_killing_time_threshold_ms": "600000",
    # Training processes are as important as other programs here. Ray's default is 15.
    "RAY_worker_niceness": "0",
    # A long validation may pause a data set for longer than the default of half an hour.
    "RAY_DATA_EXECUTION_NO_PROGRESS_TIMEOUT_S": "-1",
    # The delay until the end of training or a lost worker is noticed; the default is 2.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # The delay until workers learn that their node will be preempted. The default is 5, which is the whole
    # notice period of some nodes.
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # The time that a failed worker group has for an orderly shutdown, which a hanging worker uses up; the
    # default is 30.
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",
}
"""For each program that uses Ray."""

LOCAL_RAY_ENVIRONMENT = {
    # Otherwise Ray would require a token, and create one in the home folder.
    "RAY_AUTH_MODE": "disabled",
    # There is no dashboard. Without an address, Ray would search all processes of the machine for one each
    # second, and fail if it finds that of another Ray. No process listens on port 9.
    "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:9",
    # The raylet connects to its own object store while that starts. Each try takes this long; the defaults
    # are 10 tries of 1 s.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
    # This machine receives no preemption notices.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
"""For a Ray on this machine."""


def existing_cluster() -> str:
    """Return the address of the cluster that RAY_ADDRESS names; empty if a local Ray is to be started."""
    address = os.environ.get("RAY_ADDRESS", "")
    return "" if address == "local" else address


def set_defaults() -> None:
    """Set the variables for each program that uses Ray."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def set_local_defaults(mode: LocalRayMode) -> None:
    """Set the variables for a Ray on this machine."""
    for name, value in LOCAL_RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if mode != "full":
        # Ray would start a process per CPU when the driver connects. They have no runtime environment, so
        # that Ray Train, whose actors have one, never uses them.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
