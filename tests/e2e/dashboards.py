"""Fake dashboards of heads that do not exist, with Ray's job API, which the operator uses."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT = 8265


class Dashboards:
    """The jobs by submission ID. All of them run until `finish` is set."""

    def __init__(self) -> None:
        self.submitted: Counter[str] = Counter()
        self.without_token: list[str] = []
        self.finish = threading.Event()

    def status(self, job: str) -> str | None:
        if job not in self.submitted:
            return None
        return "SUCCEEDED" if self.finish.is_set() else "RUNNING"


@contextmanager
def answering(dashboards: Dashboards) -> Iterator[None]:
    """Answer requests to all addresses of this network namespace."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            job = self._job()
            status = dashboards.status(job)
            if status is None:
                self._answer(404, {})
            else:
                self._answer(200, {"submission_id": job, "job_id": job, "status": status})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._job()
            dashboards.submitted[body["submission_id"]] += 1
            self._answer(200, {"job_id": body["submission_id"]})

        def _job(self) -> str:
            if not self.headers.get("x-ray-authorization", "").startswith("Bearer "):
                dashboards.without_token.append(self.path)
            return self.path.removeprefix("/api/jobs/")

        def _answer(self, code: int, content: dict[str, str]) -> None:
            data = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            """Discard the message."""

    server = ThreadingHTTPServer(("0.0.0.0", PORT), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
