"""Forward a port of this machine to a port of a pod, and find the token of Ray's dashboard."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from trainyard.errors import ClusterError, ConfigError

Object = dict[str, Any]

DASHBOARD_PORT = 8265
CHUNK = 65536


class Secrets(Protocol):
    """The method of `Cluster` with which a Secret is read."""

    def get(self, kind: str, name: str) -> Object | None: ...


def dashboard_token(cluster: Secrets, ray_cluster: str) -> str:
    """Return the token of a RayCluster from the Secret of the same name; empty if it has none."""
    secret = cluster.get("Secret", ray_cluster)
    token = ((secret or {}).get("data") or {}).get("auth_token", "")
    return base64.b64decode(token).decode()


class PortForward:
    """Listens on 127.0.0.1 and forwards each connection to the pod."""

    def __init__(self, connect: Callable[[], socket.socket], port: int) -> None:
        self._connect = connect
        try:
            self._server = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"port {port} of this machine cannot be used: {error.strerror}",
                "Take another one with --port, or any with --port 0.",
            ) from error
        self.port = int(self._server.getsockname()[1])

    def __enter__(self) -> PortForward:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()

    def serve(self) -> None:
        """Accept and forward connections without end. Raises ClusterError when the pod is gone."""
        while True:
            client, _ = self._server.accept()
            try:
                pod = self._connect()
            except ClusterError:
                client.close()
                raise
            for source, target in ((client, pod), (pod, client)):
                threading.Thread(target=_pour, args=(source, target), daemon=True).start()


def _pour(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes from one socket to the other until one of them is closed, then close both."""
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
