"""Errors of Ray itself: what the user reads in place of Ray's own words."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from trainyard_trainer.errors import ConfigError, RunError
from trainyard_trainer.on_ray import ray_cluster
from trainyard_trainer.on_ray.local_ray.ray_environment import existing_cluster
from trainyard_trainer.on_ray.ray_errors import in_one_line

WRONG_ADDRESSES = (
    "http://127.0.0.1:8265", "ray://127.0.0.1:10001", "127.0.0.1", "nonsense", "127.0.0.1:port",
    "127.0.0.1:70000", "127.0.0.1:6379/", ":6379", "a b:6379",
)  # fmt: skip


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of this machine at which nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.parametrize("address", WRONG_ADDRESSES)
def test_what_is_no_address_of_a_head_is_refused_before_ray_is_asked(address: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ray_cluster.join_ray(address)
    assert str(raised.value).startswith(f"RAY_ADDRESS = {address} is not HOST:PORT.\n")
    assert "port 6379" in str(raised.value)


def test_a_head_that_is_gone_is_waited_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch, closed_port: int
) -> None:
    monkeypatch.setattr(ray_cluster, "HEAD_WAIT_S", 0.2)
    with pytest.raises(RunError) as raised:
        ray_cluster.join_ray(f"127.0.0.1:{closed_port}")
    assert "no Ray cluster answers at RAY_ADDRESS = 127.0.0.1" in str(raised.value)
    assert "ConnectionRefusedError" in str(raised.value)
    assert "Check that the head of the Ray cluster is running" in str(raised.value)


def test_a_head_that_listens_a_little_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        # The head begins to listen while the function waits for its next attempt.
        monkeypatch.setattr(ray_cluster.time, "sleep", lambda _: listening.listen())
        ray_cluster.require_head(f"127.0.0.1:{listening.getsockname()[1]}")


@pytest.mark.parametrize(
    ("value", "found"),
    [(None, ""), ("", ""), ("local", ""), ("auto", "auto"), ("10.0.0.1:6379", "10.0.0.1:6379")],
)
def test_an_empty_address_and_local_mean_a_ray_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, value: str | None, found: str
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if value is not None:
        monkeypatch.setenv("RAY_ADDRESS", value)
    assert existing_cluster() == found


START = """
from trainyard_trainer.on_ray.ray_cluster import ray_running
from trainyard_trainer.config.scaling import Scaling
from trainyard_trainer.errors import RunError
try:
    with ray_running(Scaling(num_workers=1, use_gpu=False, cpus_per_worker=1)):
        print("started")
except RunError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "limit",
    [
        pytest.param(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24)), id="files"),
        pytest.param(
            lambda: resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)), id="memory"
        ),
    ],
)
@pytest.mark.parametrize("mode", ["forked", "full"])
def test_a_local_ray_that_cannot_start_is_explained(limit: Callable[[], None], mode: str) -> None:
    variables = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    ended = subprocess.run(
        [sys.executable, "-c", START],
        env=variables | {"TRAINYARD_LOCAL_RAY": mode},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=True,
    )
    first, remedy = ended.stdout.strip().splitlines()[-2:]
    assert first.startswith("a local Ray could not be started in ")
    assert remedy.strip().startswith("Ray needs free space in ")
    assert "Traceback" not in ended.stdout


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            RuntimeError("\x1b[36mThe actor died\x1b[39m\nclass_name: A"),
            "RuntimeError: The actor died",
        ),
        (ValueError("Invalid address. To fix this, either:\n1. a"), "ValueError: Invalid address."),
        (ValueError("either:\n1. a"), "ValueError: either:"),
        (ConnectionError(), "ConnectionError"),
    ],
)
def test_an_error_of_ray_becomes_one_line(error: Exception, text: str) -> None:
    assert in_one_line(error) == text
