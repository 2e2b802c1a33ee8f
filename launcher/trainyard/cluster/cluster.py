"""One Kubernetes cluster and namespace: the requests that the launcher sends, with parsed objects."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from trainyard.cluster.command_options import command_options
from trainyard.cluster.connection import Connection
from trainyard.cluster.kinds import kind_of
from trainyard.cluster.process import PodProcess
from trainyard.errors import ClusterError, ClusterUnreachable

Object = dict[str, Any]
Objects = list[Object]
Labels = Mapping[str, "str | None"]
"""A label selector: the labels that an object must have, and their values; None stands for any value."""

PAGE = 500
"""How many objects are requested at a time; a longer list comes in pages."""
WATCH_S = 290
"""After how many seconds the API server is asked to end a watch; a new one follows."""


class Cluster:
    """The cluster of a kubeconfig context, by default of the current one, and one namespace of it."""

    def __init__(
        self, namespace: str, kubeconfig_file: Path | None = None, *, context: str | None = None
    ) -> None:
        self.namespace = namespace
        self.context = context
        self._connection = Connection(kubeconfig_file, context)
        self._served: dict[str, set[str]] = {}

    @property
    def options(self) -> str:
        """The options with which a command reaches this cluster and namespace, for commands to copy."""
        return command_options(self.namespace, self.context)

    def __str__(self) -> str:
        """Name the cluster and the namespace, for people."""
        context = self._connection.context
        how = f"context {context}" if context else "service account of this pod"
        return f"{self.host} ({how}), namespace {self.namespace}"

    @property
    def host(self) -> str:
        """The address of the API server."""
        return self._connection.host

    def version(self) -> Object:
        """Return the version of the API server: `gitVersion` and more."""
        return self._connection.json("GET", "/version")

    # Objects.

    def create(self, body: Object, *, dry_run: bool = False) -> Object:
        """Create an object and return it as stored, or as it would be stored with `dry_run`.

        The API server refuses fields that it does not know.
        """
        query = [("fieldValidation", "Strict")] + ([("dryRun", "All")] if dry_run else [])
        return self._connection.json("POST", self._path(body["kind"]), query=query, body=body)

    def get(self, kind: str, name: str) -> Object | None:
        """Return the object of a kind and name, or None if it does not exist."""
        try:
            return self._connection.json("GET", self._path(kind, name))
        except ClusterError as error:
            if error.reason == "NotFound":
                return None
            raise

    def list(
        self,
        kind: str,
        labels: Labels | None = None,
        *,
        fields: str = "",
        everywhere: bool = False,
        limit: int | None = None,
        cached: bool = False,
    ) -> Objects:
        """Return the objects of a kind that have all these labels, at most `limit` of them.

        `fields` is a field selector such as `status.phase=Pending`. `everywhere` lists all namespaces.
        `cached` accepts a slightly old state from the API server's cache, which costs it far less work.
        """
        return self.snapshot(
            kind, labels, fields=fields, everywhere=everywhere, limit=limit, cached=cached
        )[0]

    def snapshot(
        self,
        kind: str,
        labels: Labels | None = None,
        *,
        fields: str = "",
        everywhere: bool = False,
        limit: int | None = None,
        cached: bool = False,
    ) -> tuple[Objects, str]:
        """Return the objects as `list` does, and the resource version from which a watch continues."""
        path = self._path(kind, everywhere=everywhere)
        query = _selectors(labels, fields)
        found: Objects = []
        page = [("limit", str(PAGE if limit is None else min(limit, PAGE)))]
        page += [("resourceVersion", "0")] if cached else []
        while True:
            try:
                answer = self._connection.json("GET", path, query=[*query, *page])
            except ClusterError as error:
                # The continue token has expired: request the whole list without pages.
                if error.reason != "Expired" or not found:
                    raise
                answer = self._connection.json("GET", path, query=query)
                return cast(Objects, answer["items"])[:limit], _version(answer)
            found += answer["items"]
            token = answer["metadata"].get("continue")
            if not token or (limit is not None and len(found) >= limit):
                return found[:limit], _version(answer)
            page = [("limit", str(PAGE)), ("continue", token)]

    def patch(self, kind: str, name: str, body: Object) -> Object:
        """Apply a JSON merge patch and return the object; a key with the value null is removed."""
        return self._connection.json(
            "PATCH",
            self._path(kind, name),
            query=[("fieldValidation", "Strict")],
            body=body,
            content_type="application/merge-patch+json",
        )

    def delete(self, kind: str, name: str, *, grace_s: int | None = None) -> None:
        """Delete an object, and its dependents in the background; do nothing if it does not exist.

        `grace_s` is the grace period of a pod in seconds, by default the pod's own; 0 deletes it at once.
        """
        body: Object = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
        }
        body |= {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        try:
            self._connection.json("DELETE", self._path(kind, name), body=body)
        except ClusterError as error:
            if error.reason != "NotFound":
                raise

    def evict(self, pod: str) -> None:
        """Evict a pod, as `kubectl drain` does; a PodDisruptionBudget may refuse it."""
        metadata = {"name": pod, "namespace": self.namespace}
        body = {"kind": "Eviction", "apiVersion": "policy/v1", "metadata": metadata}
        self._connection.json("POST", f"{self._path('Pod', pod)}/eviction", body=body)

    def watch(
        self,
        kind: str,
        labels: Labels | None = None,
        *,
        fields: str = "",
        resource_version: str,
    ) -> Iterator[Object]:
        """Yield events `{type, object}` since a resource version, until the API server ends the watch.

        Raises ClusterError with the reason Expired if the version is too old, and ClusterUnreachable if
        the connection breaks; `trainyard.cluster.follow` handles both.
        """
        query = [
            *_selectors(labels, fields),
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(WATCH_S)),
            ("resourceVersion", resource_version),
        ]
        for line in self._connection.lines(self._path(kind), query):
            try:
                event: Object = json.loads(line)
            except ValueError as error:
                raise ClusterUnreachable("a watch broke off inside an event", str(error)) from error
            if event["type"] == "ERROR":
                status = event["object"]
                reason = "Expired" if status.get("code") == 410 else status.get("reason", "")
                raise ClusterError(
                    f"the watch of {kind} objects ended", str(status.get("message")), reason=reason
                )
            yield event

    # Logs.

    def log(
        self,
        pod: str,
        container: str,
        since_s: int | None = None,
        *,
        tail_lines: int | None = None,
        previous: bool = False,
    ) -> str:
        """Return the log of a container: all of it, the last seconds, or the last lines.

        `previous` selects the container before its last restart.
        """
        query = [("container", container), *_log_query(since_s, tail_lines, previous)]
        return self._connection.text(f"{self._path('Pod', pod)}/log", query)

    def follow_log(
        self,
        pod: str,
        container: str,
        *,
        since_s: int | None = None,
        tail_lines: int | None = None,
        since_time: str = "",
    ) -> Iterator[str]:
        """Yield the lines of a container's log as they are written, each after its timestamp and a space.

        Raises ClusterUnreachable if the connection breaks, or if nothing arrives for too long.
        """
        query = [("container", container), ("follow", "true"), ("timestamps", "true")]
        query += _log_query(since_s, tail_lines, False)
        query += [("sinceTime", since_time)] if since_time else []
        return self._connection.lines(f"{self._path('Pod', pod)}/log", query)

    # Inside a pod.

    def execute(
        self,
        pod: str,
        container: str,
        command: Sequence[str],
        *,
        stdin: bool = False,
        terminal: bool = False,
    ) -> PodProcess:
        """Start a command in a container and return its process."""
        query = [("command", word) for word in command]
        query += [("container", container), ("stdout", "true"), ("stdin", str(stdin).lower())]
        query += [("stderr", str(not terminal).lower()), ("tty", str(terminal).lower())]
        path = f"{self._path('Pod', pod)}/exec"
        websocket = self._connection.websocket(path, query, "websocket_call")
        return PodProcess(websocket, f"`{command[0]}` in pod {pod}")

    def port_forward(self, pod: str, port: int) -> socket.socket:
        """Open a connection to a port of a pod."""
        path = f"{self._path('Pod', pod)}/portforward"
        query = [("ports", str(port))]
        forward = self._connection.websocket(path, query, "portforward_call")
        return cast(socket.socket, forward.socket(port))

    # Rights.

    def can_i(self, verb: str, kind: str, subresource: str = "") -> bool:
        """Return whether the user may do this; in this namespace, if the kind is namespaced."""
        found = kind_of(kind)
        wanted = {"verb": verb, "group": found.group, "resource": found.plural}
        wanted |= {"subresource": subresource} if subresource else {}
        wanted |= {"namespace": self.namespace} if found.is_namespaced else {}
        answer = self._connection.json(
            "POST",
            "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
            body={
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": wanted},
            },
        )
        return bool(answer["status"]["allowed"])

    def _path(self, kind: str, name: str = "", *, everywhere: bool = False) -> str:
        found = kind_of(kind)
        if found.older_version and found.group_version not in self._served_versions(found.group):
            found = replace(found, group_version=found.older_version)
        return found.path("" if everywhere else self.namespace, name)

    def _served_versions(self, group: str) -> set[str]:
        """Return the versions of an API group that this cluster serves; it is asked once."""
        if group not in self._served:
            answer = self._connection.json("GET", f"/apis/{group}")
            self._served[group] = {version["groupVersion"] for version in answer["versions"]}
        return self._served[group]


def _selectors(labels: Labels | None, fields: str) -> list[tuple[str, str]]:
    wanted = [key if value is None else f"{key}={value}" for key, value in (labels or {}).items()]
    query = [("labelSelector", ",".join(wanted))] if wanted else []
    return query + ([("fieldSelector", fields)] if fields else [])


def _log_query(
    since_s: int | None, tail_lines: int | None, previous: bool
) -> list[tuple[str, str]]:
    query = [] if since_s is None else [("sinceSeconds", str(since_s))]
    query += [] if tail_lines is None else [("tailLines", str(tail_lines))]
    return query + ([("previous", "true")] if previous else [])


def _version(answer: Object) -> str:
    return str(answer["metadata"].get("resourceVersion", ""))
