"""The driver of a run that was forked from the warm process: it starts Ray, waits for a run, and becomes it.

What a driver of its own gets when it is started reaches this one in a message: the environment, the folder,
the umask and the standard streams.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from typing import TextIO

from trainyard_trainer.errors import RunError
from trainyard_trainer.on_ray.local_ray import forked_child, forked_workers, ray_environment
from trainyard_trainer.run_files.warm import messages

RESTORED = ("RAY_JOB_ID", "RAY_RAYLET_PID")
"""Variables that Ray gives to workers: the warm process has them, a driver has not."""


class WarmForkServer:
    """The fork server of this driver, its parent."""

    def __init__(self, address: str, refusals: TextIO) -> None:
        self.address = address
        self._refusals = refusals

    def cause_of_absence(self) -> str | None:
        """Return why the server cannot be used: it has proved that it can before this driver was forked."""
        return None

    def refusals(self) -> Iterator[str]:
        """Yield why a worker was not forked, for each such worker, until the server ends."""
        yield from map(str.rstrip, self._refusals)

    def end(self) -> None:
        """Do nothing: the server ends with this process."""


def wait_and_run(request: socket.socket, server: WarmForkServer, cpus: int) -> None:
    """Start a Ray with so many CPUs; then run the program that is asked for, or end if none will be."""
    from trainyard_trainer.on_ray import ray_cluster
    from trainyard_trainer.on_ray.warm.prepared_ray import PreparedRay

    gc.unfreeze()
    forked_child.separate_random_numbers()
    for name in RESTORED:
        del os.environ[name]
    forked_workers.use(server)
    try:
        prepared = PreparedRay(cpus)
    except RunError as error:
        sys.exit(f"error: {error}")
    with closing(prepared):
        try:
            request.sendall(messages.READY)
            message, streams = messages.receive(request, 3)
        except (EOFError, ConnectionError):
            return
        ray_cluster.use_prepared(prepared.used())
        _become(message, streams)
        request.sendall(messages.STARTED)
        request.close()
        # Processes that `multiprocessing` starts look at the main module.
        sys.modules["__main__"] = program = import_module(message["program"])
        sys.exit(program.main([]))


def _become(message: dict[str, object], streams: list[int]) -> None:
    """Give this process all that a driver has which is started on its own."""
    from trainyard_trainer.run_folder.measurements import startup

    startup.begin_now()
    sys.stdout.flush()
    sys.stderr.flush()
    for descriptor, stream in enumerate(streams):
        os.dup2(stream, descriptor)
        os.close(stream)
    environment, folder, umask = message["environ"], message["folder"], message["umask"]
    assert isinstance(environment, dict)
    assert isinstance(folder, str)
    assert isinstance(umask, int)
    os.umask(umask)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    ray_environment.set_defaults()
    ray_environment.set_local_defaults("forked")
    time.tzset()
    # Until the program has a handler of its own, SIGTERM ends it, and so its Ray.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.argv[:] = [str(message["program"])]
    forked_child.restore_threads()
