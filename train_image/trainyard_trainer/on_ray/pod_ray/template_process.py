"""Start the process of a pod from which the fork servers of its jobs are forked, and print what it tells."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

from trainyard_trainer.on_ray.local_ray.fork_server import own_flags

PROGRAM = str(Path(__file__).with_name("fork_template.py"))


class TemplateProcess:
    """The process that forks a fork server for each job; the kernel ends it with this one."""

    def __init__(self, first_job: str, agent_port: int) -> None:
        """`agent_port` is the port of Ray's agent in this pod, which is open when the pod is ready."""
        self.address = f"trainyard-{os.getpid()}-{secrets.token_hex(8)}"
        status, told = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            # A name in Linux' abstract namespace: there is no file that could stay.
            listener.bind("\0" + self.address)
            listener.listen(128)
            descriptors = (listener.fileno(), told)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, *own_flags(), PROGRAM),
                    *(str(os.getpid()), *map(str, descriptors), self.address, first_job),
                    f"{agent_port}",
                ],
                # Ray ends a worker when the process of this id ends. This one lasts as long as the raylet.
                env=os.environ | {"RAY_RAYLET_PID": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        os.close(told)
        self._status = os.fdopen(status, encoding="utf-8")

    def print_causes(self) -> None:
        """Print why workers are not forked, each cause once, until the process has ended."""
        seen: set[str] = set()
        for cause in map(str.rstrip, self._status):
            if cause not in seen:
                seen.add(cause)
                print(f"a worker process is not forked: {cause}", flush=True)
        print(
            f"the process that forks workers has ended: exit code {self._process.wait()}",
            flush=True,
        )

    def end(self) -> None:
        """End the process, and with it its fork servers and their workers."""
        self._process.kill()
        self._process.wait()
