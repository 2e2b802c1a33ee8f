"""A Git repository whose commits Flux applies.

Flux's source-controller cannot be built. It would offer a commit as an archive, and write its address into
the status of a GitRepository: the tests do this in its place. kustomize-controller is Flux's own.
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import itertools
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from conftest import Object, get, kubectl, wait_for

NAME = "runs"
FLUX = {
    "GitRepository": ("source.toolkit.fluxcd.io/v1", {"interval": "1h"}),
    "Kustomization": (
        "kustomize.toolkit.fluxcd.io/v1",
        {
            "interval": "1h",  # the tests ask for each reconciliation
            "prune": True,
            "wait": False,
            "path": "./",
            "sourceRef": {"kind": "GitRepository", "name": NAME},
        },
    ),
}
REQUESTS = itertools.count(1)


class Repository:
    """A repository with the files of a namespace, and the Flux objects that apply it."""

    def __init__(self, folder: Path, namespace: str, address: str, archives: Path) -> None:
        self.folder = folder
        self._namespace = namespace
        self._address = address
        self._archives = archives
        self._git("init", "--quiet")
        for kind, (version, spec) in FLUX.items():
            url = {"url": f"{address}/runs.git"} if kind == "GitRepository" else {}
            self._apply(
                {
                    "apiVersion": version,
                    "kind": kind,
                    "metadata": {"name": NAME, "namespace": namespace},
                    "spec": {**spec, **url},
                }
            )

    def commit(self) -> None:
        """Commit what the folder holds, and wait until Flux has applied it."""
        self._git("add", "--all")
        who = ("-c", "user.name=team", "-c", "user.email=team@example.com")
        self._git(*who, "commit", "--quiet", "--allow-empty", "--message", "runs")
        revision = f"main@sha1:{self._git('rev-parse', 'HEAD')}"
        self._publish(revision)
        self.reconcile(revision)

    def reconcile(self, revision: str | None = None) -> None:
        """Have Flux compare the cluster with the newest commit once more, and wait until it has."""
        asked = str(next(REQUESTS))
        annotation = f"reconcile.fluxcd.io/requestedAt={asked}"
        kubectl("annotate", "--overwrite", *self._kustomization, annotation)

        def is_done() -> bool:
            status = self._status()
            return status.get("lastHandledReconcileAt") == asked and (
                revision is None or status.get("lastAppliedRevision") == revision
            )

        wait_for("Flux has reconciled", is_done, 60, seen=self._status)

    def delete(self) -> None:
        """Delete the Flux objects, and with them what they have created."""
        kubectl("delete", *self._kustomization)
        kubectl("delete", "gitrepository", NAME, "-n", self._namespace)

    @property
    def _kustomization(self) -> tuple[str, ...]:
        return ("kustomization", NAME, "-n", self._namespace)

    def _status(self) -> Object:
        found = get("kustomizations.kustomize.toolkit.fluxcd.io", self._namespace)["items"]
        return dict(found[0].get("status") or {})

    def _publish(self, revision: str) -> None:
        name = f"{revision.rpartition(':')[2]}.tar.gz"
        archive = self._archives / name
        self._git("archive", "--format=tar.gz", f"--output={archive}", "HEAD")
        content = archive.read_bytes()
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        artifact = {
            "digest": f"sha256:{hashlib.sha256(content).hexdigest()}",
            "lastUpdateTime": now,
            "path": name,
            "revision": revision,
            "size": len(content),
            "url": f"{self._address}/{name}",
        }
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Succeeded",
            "message": "stored artifact",
            "lastTransitionTime": now,
            "observedGeneration": 1,
        }
        status = {"artifact": artifact, "conditions": [ready], "observedGeneration": 1}
        patch = json.dumps({"status": status})
        where = ("gitrepository", NAME, "-n", self._namespace)
        kubectl("patch", *where, "--subresource=status", "--type=merge", "--patch", patch)

    def _apply(self, manifest: Object) -> None:
        kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def _git(self, *arguments: str) -> str:
        command = ("git", "-C", str(self.folder), *arguments)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def repository_of(namespace: str, folder: Path) -> Iterator[Repository]:
    """An empty repository for a namespace, until the block ends."""
    sources, archives = folder / "runs", folder / "archives"
    sources.mkdir()
    archives.mkdir()
    handler = functools.partial(_Quiet, directory=str(archives))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        repository = Repository(sources, namespace, address, archives)
        try:
            yield repository
        finally:
            repository.delete()
            server.shutdown()
