"""A cluster in memory, for pure code alone; the same behaviour is shown on a real one by tests/e2e."""

from __future__ import annotations

import copy
import os
import selectors
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainyard.errors import ClusterError, ClusterUnreachable

Object = dict[str, Any]


class FakeProcess:
    """A command that has said this, and has ended so."""

    def __init__(self, output: bytes = b"", errors: str = "", exit_code: int = 0) -> None:
        self._output, self._errors, self.exit_code = output, errors, exit_code
        self.read = b""

    def __enter__(self) -> FakeProcess:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is open."""

    def output(self) -> Iterator[tuple[int, bytes]]:
        """In small pieces, as a websocket has them."""
        for start in range(0, len(self._output), 1000):
            yield 1, self._output[start : start + 1000]
        yield 2, self._errors.encode()

    def write(self, data: bytes) -> None:
        self.read = data


class LocalProcess:
    """A command that runs on this machine, as one does in a pod."""

    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
        self._selector = selectors.DefaultSelector()
        for channel, stream in ((1, self._process.stdout), (2, self._process.stderr)):
            assert stream is not None
            self._selector.register(stream, selectors.EVENT_READ, channel)

    def __enter__(self) -> LocalProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._selector.close()

    @property
    def is_open(self) -> bool:
        return bool(self._selector.get_map())

    @property
    def exit_code(self) -> int:
        return self._process.wait()

    def output(self) -> Iterator[tuple[int, bytes]]:
        while self.is_open:
            yield from self.read(60)

    def read(self, timeout_s: float) -> Iterator[tuple[int, bytes]]:
        for key, _ in self._selector.select(timeout_s):
            if data := os.read(key.fd, 2**16):
                yield key.data, data
            else:
                self._selector.unregister(key.fileobj)

    def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        try:
            while data:  # a pipe may take a part of it
                data = data[self._process.stdin.write(data) :]
        except BrokenPipeError as error:
            raise ClusterUnreachable("it reads no more") from error


class FakeCluster:
    """Objects by kind and name. `script` is what happens to the one RayJob while it is watched: a pair
    of statuses, None for its deletion, `expired` or `ended` for the watch itself, or `silent` for
    a cluster that does not answer until the next entry."""

    namespace = "team"
    context: str | None = None
    options = "-n team"

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.logs: dict[str, str] = {}
        self.script: list[Any] = []
        self.silent = False
        self.calls: list[tuple[str, str, str]] = []
        self.commands: list[tuple[str, ...]] = []
        self.processes: list[FakeProcess] = []

    def add_job(self, name: str, *, status: str = "", run: str = "digits") -> Object:
        deployment = {
            "RUNNING": "Running",
            "SUCCEEDED": "Complete",
            "STOPPED": "Complete",
            "FAILED": "Failed",
        }
        job = {
            "kind": "RayJob",
            "metadata": {
                "name": name,
                "creationTimestamp": f"2026-01-01T00:00:{len(self.objects):02}Z",
                "labels": {
                    "app.kubernetes.io/managed-by": "trainyard",
                    "trainyard.io/run": run,
                },
            },
            "status": {
                "jobStatus": status,
                "jobDeploymentStatus": deployment.get(status, ""),
                "rayClusterName": f"{name}-abc",
            },
        }
        self.objects["RayJob", name] = job
        return job

    def add_head(self, ray_cluster: str, log: str) -> None:
        name = f"{ray_cluster}-head"
        labels = {"ray.io/cluster": ray_cluster, "ray.io/node-type": "head"}
        self.objects["Pod", name] = {
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "status": {"phase": "Running"},
        }
        self.logs[name] = log

    def tick(self) -> Object | None:
        """The next entry of the script happens; gives the event that a watch would tell of it."""
        entry = self.script.pop(0)
        self.silent = entry == "silent"
        key = next(key for key in self.objects if key[0] == "RayJob")
        job = self.objects[key]
        if entry is None:
            return {"type": "DELETED", "object": self.objects.pop(key)}
        if isinstance(entry, str):
            return None
        job["status"].update(jobDeploymentStatus=entry[0], jobStatus=entry[1])
        return {"type": "MODIFIED", "object": copy.deepcopy(job)}

    def snapshot(
        self, kind: str, labels: Mapping[str, str | None] | None = None, *, fields: str = ""
    ) -> tuple[list[Object], str]:
        if kind == "RayJob" and self.silent:
            if self.script:
                self.tick()
            raise ClusterUnreachable("silent")
        return copy.deepcopy(self.list(kind, labels, fields=fields)), "7"

    def watch(
        self,
        kind: str,
        labels: Mapping[str, str | None] | None = None,
        *,
        fields: str = "",
        resource_version: str,
    ) -> Iterator[Object]:
        if kind != "RayJob":
            threading.Event().wait()  # nothing happens to it
        while self.script:
            expected, event = self.script[0], self.tick()
            if expected == "expired":
                raise ClusterError("too old", reason="Expired")
            if expected == "silent":
                raise ClusterUnreachable("silent")
            if event is None:
                return
            event["object"]["metadata"]["resourceVersion"] = "8"
            yield event
        raise AssertionError("the script ended before the watch did")

    def follow_log(
        self,
        pod: str,
        container: str,
        *,
        since_s: int | None = None,
        tail_lines: int | None = None,
        since_time: str = "",
    ) -> Iterator[str]:
        yield from (
            f"2026-01-01T00:00:00.{n:03}Z {line}"
            for n, line in enumerate(self.log(pod, container).splitlines(), 1)
        )
        threading.Event().wait()  # the driver says no more

    def create(self, body: Object, *, dry_run: bool = False) -> Object:
        if dry_run:
            return body
        self.calls.append(("create", body["kind"], body["metadata"]["name"]))
        stored = copy.deepcopy(body)
        stored["metadata"].setdefault("creationTimestamp", "2026-01-01T00:00:59Z")
        self.objects[body["kind"], body["metadata"]["name"]] = stored
        return stored

    def get(self, kind: str, name: str) -> Object | None:
        if self.silent:
            raise ClusterUnreachable("silent")
        return self.objects.get((kind, name))

    def list(
        self,
        kind: str,
        labels: Mapping[str, str | None] | None = None,
        *,
        fields: str = "",
        everywhere: bool = False,
        limit: int | None = None,
        cached: bool = False,
    ) -> list[Object]:
        wanted = (labels or {}).items()
        return [
            found
            for (its_kind, _), found in self.objects.items()
            if its_kind == kind
            and all(
                key in found["metadata"].get("labels", {})
                and value in (None, found["metadata"]["labels"][key])
                for key, value in wanted
            )
            and all(_field(found, *term.split("=", 1)) for term in fields.split(",") if term)
        ][:limit]

    def patch(self, kind: str, name: str, body: Object) -> Object:
        self.calls.append(("patch", kind, name))
        merge_patch(self.objects[kind, name], body)
        return self.objects[kind, name]

    def delete(self, kind: str, name: str) -> None:
        self.calls.append(("delete", kind, name))
        self.objects.pop((kind, name), None)

    def execute(
        self, pod: str, container: str, command: Sequence[str], *, stdin: bool = False
    ) -> FakeProcess | LocalProcess:
        self.commands.append((pod, *command))
        return self.processes.pop(0)

    def log(
        self,
        pod: str,
        container: str,
        since_s: int | None = None,
        *,
        tail_lines: int | None = None,
        previous: bool = False,
    ) -> str:
        if pod not in self.logs:
            raise ClusterError("no such pod", reason="NotFound")
        return self.logs[pod]


def _field(found: Object, path: str, value: str) -> bool:
    """Whether a field selector's term fits: a path, and the value at its end."""
    for key in path.split("."):
        found = found.get(key, {})
    return found == value


def merge_patch(target: Object, patch: Object) -> None:
    """RFC 7396: what is null goes, mappings are merged, all else is replaced."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            merge_patch(target.setdefault(key, {}), value)
        else:
            target[key] = value
