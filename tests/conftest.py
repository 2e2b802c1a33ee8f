"""Options of the whole suite."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.e2e.groups import GROUPS, is_left_out

# Each test process computes with one thread, because one runs on each core. torch reads this at its import.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Runs under test do not use the developer's warm Ray, which is found by this folder.
os.environ["XDG_RUNTIME_DIR"] = "/nonexistent"

# A property test draws 20 examples, and 100 where CI is set. It has no time limit, because the machine may be
# busy, and no database: an example that has failed once becomes a test of its own.
ALWAYS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
settings.register_profile("quick", ALWAYS, max_examples=20)
settings.register_profile("ci", ALWAYS, max_examples=100)
settings.load_profile("ci" if os.environ.get("CI") else "quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--e2e", action="store_true", help="run tests/e2e on a real cluster")
    parser.addoption(
        "--group",
        choices=list(GROUPS),
        help="of the groups of tests/e2e/groups.py, run only this one",
    )
    parser.addoption("--suite", help="run tests/e2e/SUITE, on a cluster that was made for it")
    parser.addoption("--image", help="the image that the cluster's nodes can pull")


def pytest_configure() -> None:
    """Programs under test get a Ctrl-C, also where a shell started the suite in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """tests/e2e needs a cluster and runs by `make e2e` only; a folder in it needs one of its own."""
    if collection_path.name == "e2e" and not config.getoption("--e2e"):
        return True
    if collection_path.parent.name != "e2e":
        return None
    if collection_path.is_dir():
        return collection_path.name != config.getoption("--suite") or None
    return is_left_out(collection_path.name, config.getoption("--group")) or None
