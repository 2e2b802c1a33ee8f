"""A receiver of messages on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Webhook(ThreadingHTTPServer):
    """Keeps the JSON documents that it gets."""

    def __init__(self, status: int = 200, delay_s: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = status
        self.delay_s = delay_s
        self.received: list[dict[str, Any]] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"

    def outcomes(self) -> list[str]:
        return [document["outcome"] for document in self.received]


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        document = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received.append(document)
        self.server.closing.wait(self.server.delay_s)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@contextmanager
def webhook(status: int = 200, delay_s: float = 0.0) -> Iterator[Webhook]:
    """A receiver that answers each message with a status, after a delay."""
    server = Webhook(status, delay_s)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()
