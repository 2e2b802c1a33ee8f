"""A local Ray that was started before its driver knows the run, and so the environment of the run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trainyard_trainer.environment import JOB_CONFIG_VARIABLE
from trainyard_trainer.on_ray.local_ray import forked_workers
from trainyard_trainer.on_ray.ray_cluster import NO_MODULES, environment_of_ray, ray_started


class PreparedRay:
    """Starts a Ray with so many CPUs; the workers get the environment that this process has later."""

    def __init__(self, num_cpus: int) -> None:
        self._started = ExitStack()
        ray = ray_started(num_cpus, NO_MODULES, use_gpu=False)
        self._scratch = self._started.enter_context(ray)
        with environment_of_ray():
            self._before = dict(os.environ)

    @contextmanager
    def used(self) -> Iterator[Path]:
        """Yield Ray's temporary folder for the run whose environment this process has now; then end Ray."""
        with self._started:
            with environment_of_ray():
                # It holds the variables of the run for a `ray.init` that is still to come.
                now = {name: os.environ[name] for name in os.environ.keys() - {JOB_CONFIG_VARIABLE}}
                forked_workers.tell_environment(self._before, now)
            for handler in logging.getLogger("ray").handlers:
                if isinstance(handler, logging.StreamHandler):
                    handler.setStream(sys.stderr)  # which `Output` has replaced meanwhile
            yield self._scratch

    def close(self) -> None:
        """End this Ray, if it still runs."""
        self._started.close()
