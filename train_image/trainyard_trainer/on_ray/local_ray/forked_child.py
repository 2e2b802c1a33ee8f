"""What a forked child does to be the process that its client stands for."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import resource
import runpy
import signal
import sys
from contextlib import suppress
from pathlib import Path

from trainyard_trainer.on_ray.local_ray.fork_request import RAY_WORKER, ForkedProgram, WorkerRequest

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; end it at once if that is already so."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def work(request: WorkerRequest, base_path: list[str]) -> None:
    """Be a worker, in a child of the server."""
    become(request, base_path)
    runpy.run_path(request.arguments[0], run_name="__main__")


def become(
    request: WorkerRequest, base_path: list[str], program: ForkedProgram = RAY_WORKER
) -> None:
    """Give this child all that a process has which is started in place of its client."""
    for descriptor, stream in enumerate(request.streams):
        os.dup2(stream, descriptor)
        os.close(stream)
    # The client has them from the raylet, which may have changed them.
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(0, 0 if program.has_group else os.getpgid(request.client))
    with suppress(PermissionError, ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, request.client))
        for limit in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE):
            resource.setrlimit(limit, resource.prlimit(request.client, limit))
    with suppress(OSError):
        score = Path(f"/proc/{request.client}/oom_score_adj").read_text()
        if score != Path("/proc/self/oom_score_adj").read_text():
            Path("/proc/self/oom_score_adj").write_text(score)
    os.umask(request.umask)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.signal_mask)
    folders = filter(None, request.environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [str(Path(request.arguments[0]).parent), *folders, *base_path]
    sys.argv[:] = request.arguments
    importlib.invalidate_caches()
    gc.unfreeze()
    separate_random_numbers()
    restore_threads()


def separate_random_numbers() -> None:
    """Give this child its own random numbers; Python's module `random` does this itself."""
    import multiprocessing

    import numpy as np

    np.random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)


def restore_threads() -> None:
    """Let the numeric libraries use as many threads as if they were loaded by this child.

    Ray sets OMP_NUM_THREADS for a task when it begins, unless it is set already.
    """
    import ray._private.utils
    import threadpoolctl
    import torch

    if not {"OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"} & os.environ.keys():
        threadpoolctl.threadpool_limits(len(os.sched_getaffinity(0)), user_api="blas")
    set_variable = ray._private.utils.set_omp_num_threads_if_unset

    def set_threads() -> bool:
        is_set = set_variable()
        if is_set:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        return is_set

    ray._private.utils.set_omp_num_threads_if_unset = set_threads
