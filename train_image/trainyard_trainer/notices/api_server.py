"""The API server, as a pod may use it with its own token."""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder with the pod's token, its namespace and the certificate of the API server."""

REQUEST_S = 30.0


@dataclass(frozen=True)
class ApiServer:
    """The address of the API server, and the folder of the service account."""

    address: str
    account: Path = ACCOUNT

    @classmethod
    def of(cls, environment: Mapping[str, str], account: Path = ACCOUNT) -> ApiServer:
        """Return the API server that the environment of a pod names."""
        host = environment["KUBERNETES_SERVICE_HOST"]
        port = environment["KUBERNETES_SERVICE_PORT"]
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", account)

    @property
    def namespace(self) -> str:
        """The namespace of the pod."""
        return (self.account / "namespace").read_text().strip()

    def get(self, path: str) -> dict[str, Any]:
        """Return the answer to a path with its query."""
        return self._ask(urllib.request.Request(self.address + path))

    def patch(self, path: str, operations: list[dict[str, Any]]) -> None:
        """Change an object by a JSON patch."""
        self._ask(
            urllib.request.Request(
                self.address + path,
                method="PATCH",
                data=json.dumps(operations).encode(),
                headers={"Content-Type": "application/json-patch+json"},
            )
        )

    @cached_property
    def _trusted(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=f"{self.account / 'ca.crt'}")

    def _ask(self, request: urllib.request.Request) -> dict[str, Any]:
        token = (self.account / "token").read_text().strip()
        request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=REQUEST_S, context=self._trusted) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
