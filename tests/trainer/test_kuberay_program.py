"""The `ray` that KubeRay's commands find in the image waits for the head without importing Ray."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "train_image/kuberay/ray"


def health_check(program: Path, port: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [program, "health-check", "--address", f"localhost:{port}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def with_limit(folder: Path, limit_s: int) -> Path:
    """Return a copy of the program that waits for less long."""
    copy = folder / "ray"
    copy.write_text(re.sub(r"LIMIT_S=\d+", f"LIMIT_S={limit_s}", PROGRAM.read_text()))
    copy.chmod(0o755)
    return copy


def test_a_health_check_ends_when_the_head_accepts_connections() -> None:
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        waiting = health_check(PROGRAM, head.getsockname()[1])
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.5)
        head.listen()
        began = time.monotonic()
        assert waiting.wait(20) == 0
        assert time.monotonic() - began < 10
        waiting.communicate()


def test_a_health_check_fails_after_its_limit_with_the_address(tmp_path: Path) -> None:
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        port = head.getsockname()[1]
        waiting = health_check(with_limit(tmp_path, 1), port)
        _, error = waiting.communicate(timeout=30)
    assert waiting.returncode == 1
    assert f"no program accepts connections at localhost:{port}" in error


def test_other_commands_are_those_of_ray(tmp_path: Path) -> None:
    rays = tmp_path / "rays"
    rays.write_text('#!/bin/sh\necho own: "$@"\n')
    rays.chmod(0o755)
    copy = with_limit(tmp_path, 1)
    copy.write_text(copy.read_text().replace("/opt/trainyard/bin/ray", str(rays)))
    ended = subprocess.run(
        [copy, "start", "--head", "--labels", "a b"], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "own: start --head --labels a b\n"
