"""A process that has imported what an attempt imports, and forks the processes of attempts.

An attempt imports PyTorch, Ray and much else twice: in its driver, and in the process that forks its workers.
In most tests this takes longer than the training. So both are forked here from a process that has imported
everything. A driver gets the environment, folder, streams and signals of `attempt_client`, the process that
stands for the attempt. If that process is killed, so is the driver.

Variables that Python or a library reads when it is loaded cannot be changed for a forked process. An attempt
with other values of them is started as users start it.
"""

from __future__ import annotations

import atexit
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO

from trainyard_trainer.on_ray.local_ray import (
    fork_server,
    forkable,
    forked_child,
    forked_workers,
    ray_environment,
)
from trainyard_trainer.on_ray.local_ray.fork_request import ForkedProgram, WorkerRequest
from trainyard_trainer.on_ray.local_ray.fork_server import ForkServer
from trainyard_trainer.on_ray.pod_ray import fork_template
from trainyard_trainer.run_folder.measurements import startup

MODULES = (
    *(*forked_workers.MODULES, "trainyard_trainer.program", "sklearn.datasets"),
    *("trainyard_trainer.attempt.without_ray", "trainyard_trainer.report.report"),
)
"""What the server imports: what workers import, and what a driver imports until its end."""

ATTEMPT = ForkedProgram(
    "attempt", may_differ=fork_template.DRIVER.may_differ | {"RAY_CLUSTER_NAME"}
)
"""The driver of an attempt. KubeRay sets RAY_CLUSTER_NAME, which trainyard reads when it needs it."""

DRIVER_FILE = "driver-of-{client}"
"""The file in TMPDIR with the process id of the driver for which a client stands."""

INIT = 1
"""A process that does not end. Ray's workers end with the process whose id was known when Ray was imported.
These end with the process that has forked them."""


class OwnForkServer:
    """The process that forks the workers of an attempt: a child of its driver."""

    def __init__(self, loaded: dict[str, str], base_path: list[str]) -> None:
        """Fork it. `loaded` is the environment with which the libraries were loaded."""
        self.address = f"trainyard-{os.getpid()}-{secrets.token_hex(8)}"
        refusals, told = os.pipe()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + self.address)
        listener.listen(128)
        driver = os.getpid()
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            forked_child.die_with(driver)
            serve_workers(listener, told, loaded, base_path)
        listener.close()
        os.close(told)
        self._refusals: TextIO = os.fdopen(refusals, encoding="utf-8")

    def cause_of_absence(self) -> str | None:
        """Return None: the server had imported its modules before it was forked."""
        return None

    def refusals(self) -> Iterator[str]:
        """Yield why a worker was not forked, for each such worker, until the server ends."""
        yield from map(str.rstrip, self._refusals)

    def end(self) -> None:
        """End the server, and with it the workers."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def serve_workers(
    listener: socket.socket, told: int, loaded: dict[str, str], base_path: list[str]
) -> NoReturn:
    """Be a fork server of workers; be a worker in each child, and end as that program ends."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        set_title("fork_server.py")
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):
            os.dup2(nothing, stream)
        for descriptor in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
            if descriptor > 2 and descriptor not in (listener.fileno(), told):
                with suppress(OSError):
                    os.close(descriptor)
        hold_scratch_folder()
        reopen_output()
        forked_child.work(ForkServer(listener, told, loaded).serve(), base_path)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - the outermost handler of this process
        traceback.print_exc()
    finally:
        # Nothing of the driver, which this process was forked from, may go on here.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def reopen_output() -> None:
    """Let Python write to the output and error streams that this process has now."""
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False)  # type: ignore[misc]


def hold_scratch_folder() -> None:
    """Open TMPDIR, by which `Attempts.processes` knows this process and those that are forked from it."""
    os.open(os.environ["TMPDIR"], os.O_RDONLY)


def tell_process(file: Path) -> None:
    """Write the id of this process into a file, which is complete as soon as it exists."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(file)


def set_title(title: str) -> None:
    """Let `ps` show the process with this title."""
    raylet: Any = import_module("ray")._raylet
    raylet.setproctitle(title)


def run_attempt(request: WorkerRequest, loaded: dict[str, str], base_path: list[str]) -> None:
    """Be the driver of an attempt, in a child of the server."""
    startup.begin_now()
    forked_child.become(request, base_path, ATTEMPT)
    sys.path[0] = str(Path.cwd())
    arguments = request.arguments[1:]
    set_title(" ".join([sys.executable, "-m", "trainyard_trainer", *arguments]))
    hold_scratch_folder()
    tempfile.tempdir = None
    tell_process(Path(os.environ["TMPDIR"], DRIVER_FILE.format(client=request.client)))
    time.tzset()
    reopen_output()
    ray_environment.set_defaults()
    server: Callable[[], Any] = lambda: OwnForkServer(loaded, base_path)  # noqa: E731
    forked_workers.ForkServerProcess = server  # type: ignore[assignment,misc]
    # Processes that `multiprocessing` starts look at the main module.
    sys.modules["__main__"] = program = import_module("trainyard_trainer.program")
    sys.exit(program.main(arguments))


def main() -> None:
    """Import the modules, tell whether forking is safe, and serve."""
    parent, listener, status = map(int, sys.argv[1:4])
    forked_child.die_with(parent)
    folders = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    del sys.path[0]  # the folder of this file
    of_drivers = {name: os.environ[name] for name in os.environ.keys() - {"RAY_RAYLET_PID"}}
    os.environ |= {"RAY_JOB_ID": forked_workers.FIRST_JOB, "RAY_RAYLET_PID": str(INIT)}
    ray_environment.set_defaults()
    ray_environment.set_local_defaults("forked")
    loaded = forkable.load(MODULES)
    base_path = [folder for folder in sys.path if folder not in folders]
    cause = forkable.cause_not_to_fork() or forkable.cause_by_trial()
    os.write(status, f"{cause or fork_server.READY}\n".encode())
    if cause is not None:
        return
    forkable.keep_memory_shared()
    drivers = ForkServer(socket.socket(fileno=listener), None, of_drivers, program=ATTEMPT)
    run_attempt(drivers.serve(), loaded, base_path)


if __name__ == "__main__":
    main()
