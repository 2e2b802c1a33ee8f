"""Options of the whole suite."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--e2e", action="store_true", help="run tests/e2e on a real cluster")
    parser.addoption("--image", help="the image that the cluster's nodes can pull")


def pytest_configure() -> None:
    """Programs under test get a Ctrl-C, also where a shell started the suite in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """tests/e2e needs a cluster and runs by `make e2e` only."""
    if collection_path.name == "e2e" and not config.getoption("--e2e"):
        return True
    return None
