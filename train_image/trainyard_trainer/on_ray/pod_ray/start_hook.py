"""Change what `ray start` starts in a pod: Ray calls `prepare`, which RAY_START_HOOK of the image names."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from threading import Thread
from typing import Any

from trainyard_trainer.on_ray.local_ray.fork_client import TEMPLATE_VARIABLE
from trainyard_trainer.on_ray.local_ray.forked_workers import CLIENT, say_why
from trainyard_trainer.on_ray.pod_ray.driver_client import DRIVERS
from trainyard_trainer.on_ray.pod_ray.template_process import TemplateProcess
from trainyard_trainer.run_files.local_ray import LOCAL_RAY_VARIABLE

DRIVERS_JOB = "02000000"
"""The id of the job of the first driver of a cluster. Ray's own job server has the first job."""


def prepare(ray_params: Any, is_head: bool) -> None:
    """Change the parameters of a `ray start` before it starts processes.

    A head gets no Ray Client server and no autoscaler of its own: no run uses them, and each imports Ray
    while the head starts. In a pod whose workers may be forked, the process that does this is started.
    """
    if is_head:
        ray_params.ray_client_server_port = None
        ray_params.no_monitor = True
    if os.environ.get(LOCAL_RAY_VARIABLE) != "forked":
        return
    if (cause := cause_not_to_fork(ray_params)) is not None:
        say_why(cause)
        return
    if is_head:
        # As `ray start` does later in a head of KubeRay. Forked workers have the variables of this moment.
        os.environ.setdefault("RAY_enable_autoscaler_v2", "1")
    first = [DRIVERS, DRIVERS_JOB] if is_head else [DRIVERS_JOB]
    template = TemplateProcess(first, ray_params.dashboard_agent_listen_port)
    # The raylet and its workers inherit it.
    os.environ[TEMPLATE_VARIABLE] = template.address
    ray_params.setup_worker_path = CLIENT
    Thread(target=template.print_causes, name="fork-causes", daemon=True).start()


def cause_not_to_fork(ray_params: Any) -> str | None:
    """Return why the workers of this pod cannot be forked, or None."""
    if sys.platform != "linux":
        return f"this needs Linux, and this is {sys.platform}"
    if ray_params.num_gpus or Path("/dev/nvidiactl").exists():
        return "this pod has GPUs"
    return None
