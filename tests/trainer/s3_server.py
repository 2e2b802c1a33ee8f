"""A real S3 server on this machine, versitygw: it keeps objects as files and knows conditional writes."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
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


@dataclass(frozen=True)
class Server:
    """A server with users of its own; its root is whom CREDENTIALS name."""

    address: str
    """HOST:PORT."""
    folder: Path

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}"

    def make_bucket(self, name: str) -> None:
        self._ask("PUT", f"/{name}")

    def add_user(self, key: str, secret: str) -> None:
        self._administer("create-user", "--access", key, "--secret", secret, "--role", "user")

    def change_secret(self, key: str, secret: str) -> None:
        """From now on the user's old one is refused, as one that has expired."""
        self._administer("update-user", "--access", key, "--secret", secret)

    def allow(self, bucket: str, user: str, *actions: str) -> None:
        """These and no other actions of this user: `s3:PutObject` and the like."""
        both = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
        on_bucket = [action for action in actions if action in ON_BUCKETS]
        on_objects = [action for action in actions if action not in ON_BUCKETS]
        statements = [
            {"Effect": "Allow", "Principal": {"AWS": [user]}, "Action": few, "Resource": [place]}
            for place, few in zip(both, (on_bucket, on_objects), strict=True)
            if few
        ]
        policy = {"Version": "2012-10-17", "Statement": statements}
        self._ask("PUT", f"/{bucket}", "policy", json.dumps(policy).encode())

    def _administer(self, *command: str) -> None:
        root = ("--access", CREDENTIALS["AWS_ACCESS_KEY_ID"])
        root += ("--secret", CREDENTIALS["AWS_SECRET_ACCESS_KEY"])
        done = subprocess.run(
            [_program(), "admin", *root, "--endpoint-url", self.endpoint, *command],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def _ask(self, method: str, path: str, query: str = "", body: bytes = b"") -> None:
        """A request of the root, signed as AWS asks for (Signature Version 4)."""
        time_of_it = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        hashed = hashlib.sha256(body).hexdigest()
        query = f"{query}=" if query else ""
        headers = {"host": self.address, "x-amz-content-sha256": hashed, "x-amz-date": time_of_it}
        names = ";".join(headers)
        lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
        request = "\n".join((method, path, query, lines, names, hashed))
        scope = f"{time_of_it[:8]}/{CREDENTIALS['AWS_REGION']}/s3/aws4_request"
        key = f"AWS4{CREDENTIALS['AWS_SECRET_ACCESS_KEY']}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        text = (
            f"AWS4-HMAC-SHA256\n{time_of_it}\n{scope}\n"
            + hashlib.sha256(request.encode()).hexdigest()
        )
        signature = hmac.digest(key, text.encode(), "sha256").hex()
        who = f"AWS4-HMAC-SHA256 Credential={CREDENTIALS['AWS_ACCESS_KEY_ID']}/{scope}"
        headers["authorization"] = f"{who}, SignedHeaders={names}, Signature={signature}"
        connection = http.client.HTTPConnection(self.address, timeout=10)
        connection.request(method, f"{path}?{query}" if query else path, body or None, headers)
        answer = connection.getresponse()
        assert answer.status < 300, answer.read()
        connection.close()


ON_BUCKETS = {"s3:ListBucket", "s3:GetBucketLocation", "s3:ListBucketMultipartUploads"}
"""Actions on a bucket; all others are on its objects."""

ALL = (
    "s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload",
)  # fmt: skip
"""What a run does."""


@contextmanager
def running_server(folder: Path, host: str = "127.0.0.1") -> Iterator[Server]:
    """A server that keeps objects and users in the folder."""
    for name in ("objects", "users"):
        (folder / name).mkdir(parents=True)
    address = f"{host}:{_free_port(host)}"
    keys = {
        "ROOT_ACCESS_KEY": CREDENTIALS["AWS_ACCESS_KEY_ID"],
        "ROOT_SECRET_KEY": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
    }
    command = [_program(), "--port", address, "--quiet", "--iam-dir", folder / "users"]
    # A secret that was changed is changed at once.
    command += ["--iam-cache-disable", "posix", folder / "objects"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            command, env={**os.environ, **keys}, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        _await_answer(address, server, folder / "log")
        yield Server(address, folder)
    finally:
        server.kill()
        server.wait()


@contextmanager
def running_bucket(folder: Path) -> Iterator[Bucket]:
    """A bucket of a server that keeps its objects in the folder."""
    with running_server(folder) as server:
        server.make_bucket("bucket")
        yield Bucket("s3://bucket", server.endpoint)


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


def _free_port(host: str) -> int:
    with socket.socket() as one:
        one.bind((host, 0))
        return one.getsockname()[1]


def _await_answer(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    host, _, port = address.partition(":")
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
