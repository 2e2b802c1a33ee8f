"""A port of this machine leads to a pod, for as many as come."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from fake_cluster import FakeCluster

from trainyard.cluster.port_forward import PortForward, dashboard_token
from trainyard.errors import ClusterUnreachable, ConfigError


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that answers in capitals."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            with client:
                while data := client.recv(100):
                    client.sendall(data.upper())

    threading.Thread(target=serve, daemon=True).start()
    yield server.getsockname()[1]
    server.close()


def test_what_is_said_to_the_port_is_said_to_the_pod(echo: int) -> None:
    with PortForward(lambda: socket.create_connection(("127.0.0.1", echo)), 0) as forward:
        threading.Thread(target=forward.serve, daemon=True).start()
        for word in (b"one", b"two"):
            with socket.create_connection(("127.0.0.1", forward.port), timeout=10) as client:
                client.sendall(word)
                assert client.recv(100) == word.upper()


def test_a_pod_that_is_gone_ends_the_tunnel() -> None:
    def connect() -> socket.socket:
        raise ClusterUnreachable("gone")

    with PortForward(connect, 0) as forward:
        client = socket.create_connection(("127.0.0.1", forward.port), timeout=10)
        with pytest.raises(ClusterUnreachable, match="gone"):
            forward.serve()
        assert client.recv(1) == b""


def test_a_port_that_is_taken_is_named_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}") as raised:
            PortForward(lambda: taken, port)
    assert "--port 0" in str(raised.value)


def test_the_token_is_that_of_the_ray_cluster() -> None:
    cluster = FakeCluster()
    cluster.objects["Secret", "digits-1-abc"] = {"data": {"auth_token": "c2VjcmV0"}}
    assert dashboard_token(cluster, "digits-1-abc") == "secret"
    assert dashboard_token(cluster, "other") == ""
