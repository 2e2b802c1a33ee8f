"""A Ray of the test's own process."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray


@contextmanager
def own_ray(num_cpus: int, **environment: str) -> Iterator[None]:
    """A Ray with so many CPUs, and what else is to be in the environment before it starts."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        for name, value in {"RAY_AUTH_MODE": "disabled", **environment}.items():
            patch.setenv(name, value)
        ray.init(
            address="local",
            num_cpus=num_cpus,
            object_store_memory=2**27,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=f"{scratch}/ray",
        )
        yield
        ray.shutdown()
