"""An API server as a program in a pod finds it: with its own certificate, and a service account's folder."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass
class PodApi:
    """The environment of the pod, the folder of its account, and what the server was asked."""

    environment: dict[str, str]
    account: Path
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request."""
    tokens: set[str | None] = field(default_factory=set)
    patches: list[Any] = field(default_factory=list)
    """The bodies of PATCH requests."""


@contextmanager
def pod_api(folder: Path, answer: Callable[[str], dict[str, Any]]) -> Iterator[PodApi]:
    """Serve `answer` of the path of each GET request, in the namespace `team`."""
    certificate, key = folder / "ca.crt", folder / "tls.key"
    subprocess.run(
        ["openssl", "req", "-x509", *KEY, "-keyout", key, "-out", certificate, "-days", "1"]
        + ["-subj", "/CN=api", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )
    (folder / "token").write_text("t0ken\n")
    (folder / "namespace").write_text("team")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(answer(self.path))

        def do_PATCH(self) -> None:
            assert self.headers["Content-Type"] == "application/json-patch+json"
            api.patches.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._reply({})

        def _reply(self, content: dict[str, Any]) -> None:
            api.asked.append((self.command, self.path))
            api.tokens.add(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *arguments: Any) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    where = {"HOST": "127.0.0.1", "PORT": f"{server.server_port}"}
    api = PodApi({f"KUBERNETES_SERVICE_{key}": value for key, value in where.items()}, folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
