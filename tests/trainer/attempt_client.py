"""The process that stands for an attempt: it has the attempt's driver forked by `attempt_server`.

It is started with the name of the server's socket and the arguments of the attempt. If the server does not
fork this attempt, this process becomes the driver itself.
"""

from __future__ import annotations

import os
import socket
import sys

from trainyard_trainer.on_ray.local_ray import fork_client


def main() -> None:
    """Have the driver forked, and end as it ends."""
    address, *arguments = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as server:
        server.connect("\0" + address)
        cause = fork_client.be_forked(server, ["attempt", *arguments])
    if os.environ.get("TRAINYARD_TEST_MUST_FORK"):
        sys.exit(f"the attempt is not forked: {cause}")
    os.execv(sys.executable, [sys.executable, "-m", "trainyard_trainer", *arguments])


if __name__ == "__main__":
    main()
