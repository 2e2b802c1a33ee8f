"""A small Hugging Face Hub on this machine: what huggingface_hub 2.4 asks to list and fetch a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_token_of_tests"
LARGE = ".safetensors"
"""The ending of files of which the hub tells the SHA-256 (LFS)."""


def commit_of(number: int) -> str:
    return f"{number:040x}"


@dataclass
class Hub:
    """Models by their names, as folders by revision, and how the hub behaves."""

    endpoint: str = ""
    models: dict[str, dict[str, Path]] = field(default_factory=dict)
    """Of a name and a commit the folder with the files."""
    branches: dict[str, str] = field(default_factory=dict)
    """The commit of each branch, of all models."""
    gated: bool = False
    """Files need a token, and the list of files does not."""
    private: bool = False
    """Without a token there is no such model."""
    cuts: int = 0
    """How many answers with weights end after half of their bytes."""
    spoils: bool = False
    """Weights come with other bytes."""
    down: bool = False
    """All answers are 503."""
    fetched: list[str] = field(default_factory=list)
    """The files that were sent."""

    def publish(self, name: str, folder: Path, number: int = 1) -> str:
        """Make the folder the newest commit of a model on `main`, and return the commit."""
        commit = commit_of(number)
        self.models.setdefault(name, {})[commit] = folder
        self.branches["main"] = commit
        return commit


class HubHandler(BaseHTTPRequestHandler):
    """Answers as huggingface.co does."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        has_token = self.headers.get("authorization") == f"Bearer {TOKEN}"
        if parts[:2] == ["api", "models"]:
            name, revision = "/".join(parts[2:4]), "/".join(parts[5:])
        else:
            name, revision = "/".join(parts[:2]), "".join(parts[3:4])
        commits = self.hub.models.get(name, {})
        commit = self.hub.branches.get(revision, revision)
        if self.hub.down:
            self._refuse(503, "")
        elif not commits or (self.hub.private and not has_token):
            self._refuse(401, "RepoNotFound")
        elif commit not in commits:
            self._refuse(404, "RevisionNotFound")
        elif parts[0] == "api":
            self._list(name, commit, commits[commit])
        elif self.hub.gated and not has_token:
            self._refuse(403, "GatedRepo")
        else:
            self._send(commits[commit] / "/".join(parts[4:]), commit, has_body=has_body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _list(self, name: str, commit: str, folder: Path) -> None:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        siblings: list[dict[str, Any]] = []
        for path in files:
            size = path.stat().st_size
            entry = {
                "rfilename": str(path.relative_to(folder)), "size": size, "blobId": _blob(path),
            }  # fmt: skip
            if path.name.endswith(LARGE):
                lfs = {"sha256": _sha256(path), "size": size, "pointerSize": 134}
                entry["lfs"] = lfs
            siblings.append(entry)
        body = json.dumps({"id": name, "sha": commit, "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send(self, path: Path, commit: str, *, has_body: bool) -> None:
        data = path.read_bytes()
        is_large = path.name.endswith(LARGE)
        first = int((self.headers.get("range") or "bytes=0-")[6:].partition("-")[0])
        self.send_response(206 if first else 200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{_sha256(path) if is_large else _blob(path)}"')
        self.send_header("Content-Length", str(len(data) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not has_body:
            return
        self.hub.fetched.append(path.name)
        if is_large and self.hub.spoils:
            data = bytes(len(data))
        if is_large and self.hub.cuts:
            self.hub.cuts -= 1
            self.wfile.write(data[first : first + (len(data) - first) // 2])
            self.close_connection = True
            return
        self.wfile.write(data[first:])


def _blob(path: Path) -> str:
    data = path.read_bytes()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def running_hub(host: str = "127.0.0.1") -> Iterator[Hub]:
    """Serve a hub without models at an address of this machine."""
    hub = Hub()
    handler = type("HandlerOfHub", (HubHandler,), {"hub": hub})
    server = ThreadingHTTPServer((host, 0), handler)
    hub.endpoint = f"http://{host}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
