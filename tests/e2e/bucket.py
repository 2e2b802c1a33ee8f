"""A bucket that pods can use: a real S3 server on this machine, and a proxy that fails before it."""

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
    """A secret that stands nowhere by chance."""
    return f"canary-{secrets.token_hex(12)}"


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """What the pods see of S3: all of it through the proxy."""

    server: Server
    proxy: Proxy
    secret: str
    """The user's secret key."""

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
        """Of the runs, as the server keeps them."""
        return self.server.folder / "objects/runs/team"

    def give_to(self, team: Team, folder: Path, **values: Any) -> None:
        """Install a platform there whose runs lie here; its values are written to the folder."""
        secret(team, "bucket", **keys(USER, self.secret))
        team.install(folder, storage={"claim": None, "s3": self.values}, **values)

    def files(self, run: str) -> list[Path]:
        """Objects of a run's folder."""
        return [path for path in (self.folder / run).rglob("*") if path.is_file()]

    def progress(self, run: str) -> Object:
        """As it lies on the server's disk: a command each second would take the run's CPU."""
        file = self.folder / run / "progress.json"
        found: Object = json.loads(file.read_text()) if file.exists() else {"step": 0}
        return found


@contextmanager
def running_bucket(folder: Path) -> Iterator[Bucket]:
    """On the node's own address: only of tests/cluster is this machine the node."""
    addresses = get("nodes", "default")["items"][0]["status"]["addresses"]
    (node,) = [one["address"] for one in addresses if one["type"] == "InternalIP"]
    if not node.startswith("198.18."):
        pytest.skip("only the pods of tests/cluster reach a server that this machine starts")
    with running_server(folder, node) as server, running_proxy(server.address) as proxy:
        found = Bucket(server=server, proxy=proxy, secret=canary())
        server.make_bucket("runs")
        server.add_user(USER, found.secret)
        server.allow("runs", USER, *ALL)
        yield found


def in_bucket(scenario: Scenario, strike: Strike | None = None) -> Scenario:
    """The drill that is done on a volume, too."""
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
