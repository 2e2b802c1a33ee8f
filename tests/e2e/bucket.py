"""A bucket for the pods of the test cluster: an S3 server behind a proxy that can inject faults."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Object, Team, get, kubectl

from tests.trainer.s3_proxy import Proxy, running_proxy
from tests.trainer.s3_server import ALL, Server, running_server
from trainyard.drills.scenarios import Scenario
from trainyard.drills.strikes import Strike

USER = "ada"


def canary() -> str:
    """Return a random secret, so that each place where it is found is a leak."""
    return f"canary-{secrets.token_hex(12)}"


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """An S3 server that the pods reach only through a proxy."""

    server: Server
    proxy: Proxy
    secret: str
    """The secret key of the user."""

    @property
    def values(self) -> Object:
        return {
            "path": "s3://runs/team",
            "endpoint": f"http://{self.proxy.address}",
            "secretName": "bucket",
            "region": "us-east-1",
        }

    @property
    def folder(self) -> Path:
        """The folder of the runs on the server's disk."""
        return self.server.folder / "objects/runs/team"

    def give_to(self, team: Team, folder: Path, **values: Any) -> None:
        """Install a platform whose storage is this bucket. Its values are written to the folder."""
        secret(team, "bucket", **keys(USER, self.secret))
        team.install(folder, storage={"claim": None, "s3": self.values}, **values)

    def files(self, run: str) -> list[Path]:
        """Return the objects in a run's folder."""
        return [path for path in (self.folder / run).rglob("*") if path.is_file()]

    def progress(self, run: str) -> Object:
        """Return progress.json from the server's disk. A command each second would use the run's CPU."""
        file = self.folder / run / "progress.json"
        found: Object = json.loads(file.read_text()) if file.exists() else {"step": 0}
        return found


def address_of_node() -> str:
    """Return the node's own address, if it is the node of tests/cluster: only that one is this machine."""
    addresses = get("nodes", "default")["items"][0]["status"]["addresses"]
    (node,) = [one["address"] for one in addresses if one["type"] == "InternalIP"]
    if not node.startswith("198.18."):
        pytest.skip("only the pods of tests/cluster reach a server that this machine starts")
    return node


@contextmanager
def running_bucket(folder: Path) -> Iterator[Bucket]:
    """Start the server on the node's own address."""
    node = address_of_node()
    with running_server(folder, node) as server, running_proxy(server.address) as proxy:
        found = Bucket(server=server, proxy=proxy, secret=canary())
        server.make_bucket("runs")
        server.add_user(USER, found.secret)
        server.allow("runs", USER, *ALL)
        yield found


def in_bucket(scenario: Scenario, strike: Strike | None = None) -> Scenario:
    """Return the scenario of a drill on a volume, changed for a bucket."""
    return replace(
        scenario,
        name=f"{scenario.name}-s3",
        fault=f"{scenario.fault}; the run is in a bucket",
        strike=strike or scenario.strike,
    )


def secret(team: Team, name: str, **data: str) -> None:
    kind = "kubernetes.io/dockerconfigjson" if ".dockerconfigjson" in data else "Opaque"
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    body = {"apiVersion": "v1", "kind": "Secret", "type": kind, "data": encoded}
    body |= {"metadata": {"name": name}}
    kubectl("create", "-n", team.namespace, "-f", "-", stdin=json.dumps(body))


def keys(user: str, secret_key: str) -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": user, "AWS_SECRET_ACCESS_KEY": secret_key}
