"""The driver's side of forked drivers: ask the head of a standing cluster to fork the driver's process.

This module imports nothing but the standard library, since a driver that is forked needs nothing else.
"""

from __future__ import annotations

import os
import socket
import sys

from trainyard_trainer.on_ray.local_ray import fork_client

DRIVERS = "drivers"
"""The name of the fork server of drivers, beside those of jobs."""

READY_S = 60.0
"""Seconds within which that process must have imported its modules."""


def be_forked(program: str) -> None:
    """Let a forked process be the driver, and end as it ends; return if this process must be the driver.

    `program` is the driver's module, whose `main` is called. The forked process gets the environment, folder
    and streams of this one, and the signals that this one receives. If this process is killed, so is the
    driver.
    """
    template = os.environ.get(fork_client.TEMPLATE_VARIABLE)
    if template is None or sys.argv[1:]:
        return
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(READY_S)
        try:
            fork_client.connect_in_pod(server, template, DRIVERS)
            cause = fork_client.be_forked(server, [DRIVERS, program, *sys.orig_argv])
        except OSError as error:
            cause = f"the process that forks them does not answer: {error}"
    print(f"the driver is not forked: {cause}", flush=True)
