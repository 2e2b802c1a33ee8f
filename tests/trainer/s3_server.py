"""A real S3 server on this machine, versitygw: it keeps objects as files and knows conditional writes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.charts.helm_chart import find_tool, missing

CLUSTER = Path(__file__).parents[1] / "cluster" / "cluster.py"

START_S = 20.0

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "trainyard",
    "AWS_SECRET_ACCESS_KEY": "trainyard-secret",
    "AWS_REGION": "us-east-1",
    # This machine is none of Amazon's, and asking for its role would take seconds.
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True)
class Bucket:
    path: str
    endpoint: str


@contextmanager
def running_bucket(folder: Path) -> Iterator[Bucket]:
    """A bucket of a server that keeps its objects in the folder."""
    bucket = folder / "objects" / "bucket"
    bucket.mkdir(parents=True)
    port = _free_port()
    address = f"127.0.0.1:{port}"
    keys = {
        "ROOT_ACCESS_KEY": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "ROOT_SECRET_KEY": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [_program(), "--port", address, "--quiet", "posix", bucket.parent],
            env={**os.environ, **keys}, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        _await_answer(port, server, folder / "log")
        yield Bucket("s3://bucket", f"http://{address}")
    finally:
        server.kill()
        server.wait()


def _program() -> Path:
    """Where the test cluster keeps its tools; built there if Go is at hand."""
    if not (program := find_tool("versitygw")):
        if not shutil.which("go"):
            missing("versitygw is not built, and there is no Go to build it")
        built = subprocess.run([sys.executable, CLUSTER, "build", "s3"], check=False)
        if built.returncode:
            missing("versitygw could not be built")
        program = find_tool("versitygw")
        assert program
    return program


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _await_answer(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
