"""A proxy before an S3 server that answers in its place with 503, cuts the line, or takes its time."""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

Fault = Literal["503", "reset", "cut", "slow"]
"""An answer of the proxy's own; a reset instead of an answer; a reset in the middle of one; a late one."""

BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
ANSWER_503 = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    b"Content-Length: " + str(len(BUSY)).encode() + b"\r\n\r\n" + BUSY
)
SLOW_S = 0.5
"""How late a late answer is."""
CUT_AFTER = 100
"""Bytes of an answer that is cut: within its headers or soon after."""


class Proxy:
    """Passes requests on to a server until it is told to be faulty."""

    def __init__(self, target: str) -> None:
        host, _, port = target.partition(":")
        self.target = host, int(port)
        self.struck = 0
        """Requests that met a fault."""
        self._fault: Fault | None = None
        self._left: float = 0
        self._lock = threading.Lock()
        self._struck = threading.Condition(self._lock)
        proxy = self

        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with suppress(OSError):  # either end may leave at any time
                    proxy._serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server((host, 0), Connection)
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def fail(self, fault: Fault, times: float = float("inf")) -> None:
        """The next requests meet this fault: so many, or all until `heal`."""
        with self._lock:
            self._fault, self._left = fault, times

    def heal(self) -> None:
        self.fail("503", 0)

    def await_struck(self, count: int, timeout_s: float = 60) -> None:
        """Until so many requests have met a fault, since the beginning."""
        with self._lock:
            assert self._struck.wait_for(lambda: self.struck >= count, timeout_s), self.struck

    def _next_fault(self) -> Fault | None:
        with self._lock:
            if self._left <= 0:
                return None
            self._left -= 1
            self.struck += 1
            self._struck.notify_all()
            return self._fault

    def _serve(self, client: socket.socket) -> None:
        """One request: neither the server nor the proxy keeps connections open."""
        head = client.recv(2**16)
        fault = self._next_fault() if head else None
        if fault == "reset":
            _reset(client)
        elif fault == "503":
            client.sendall(ANSWER_503)
            client.shutdown(socket.SHUT_WR)
            while client.recv(2**16):  # an answer is lost if its line is cut before all was asked
                pass
        elif head:
            if fault == "slow":
                time.sleep(SLOW_S)
            self._pass_on(client, head, is_cut=fault == "cut")

    def _pass_on(self, client: socket.socket, head: bytes, *, is_cut: bool) -> None:
        with socket.create_connection(self.target) as server:
            server.sendall(head)
            up = threading.Thread(target=_pump, args=(client, server), daemon=True)
            up.start()
            if is_cut:
                client.sendall(server.recv(CUT_AFTER))
                client.shutdown(socket.SHUT_RD)  # who still reads it keeps it open
                up.join()
                _reset(client)
            else:
                _pump(server, client)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(2**16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def _reset(connection: socket.socket) -> None:
    """Close with RST in place of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextmanager
def running_proxy(target: str) -> Iterator[Proxy]:
    with Proxy(target) as proxy:
        yield proxy
