"""A program that stands for the raylet's metrics agent (`ray/dashboard/agent.py`) and does nothing.

A raylet does not start without this agent: it waits until the agent has written its ports, and ends if the
agent ends. Ray's own agent imports a hundred packages first. This program imports nothing of Ray; like Ray's
minimal agent, it writes that there are no ports, and lasts as long as the raylet.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

NO_PORT = "-1"
"""What Ray's minimal agent writes for a service that it does not have."""

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""The services whose ports the raylet waits for."""


def write_port(folder: Path, service: str, node: str) -> None:
    """Write the file that tells the raylet the port of a service, as `ray._raylet.persist_port` does."""
    written = folder / f"{service}_{node}.written"
    written.write_text(NO_PORT)
    written.replace(folder / f"{service}_{node}")


def main() -> None:
    """Write the ports, and wait for the end of the raylet, which holds the other end of standard input."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--session-dir", type=Path, required=True)
    parser.add_argument("--node-id", required=True)
    wanted, _ = parser.parse_known_args()
    for service in PORTS:
        write_port(wanted.session_dir, service, wanted.node_id)
    while os.read(sys.stdin.fileno(), 4096):
        pass


if __name__ == "__main__":
    main()
