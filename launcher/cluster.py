"""One Kubernetes cluster and namespace: parsed dicts in and out. The only import of `kubernetes`.

No exception of the client leaves this module: each becomes a ClusterError with Kubernetes' reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import urllib3
from kubernetes import config as kubeconfig
from kubernetes.client import Configuration
from kubernetes.client.api_client import ApiClient
from kubernetes.client.exceptions import ApiException
from yaml import YAMLError

from launcher.errors import ClusterError, ClusterUnreachable

Object = dict[str, Any]
Objects = list[Object]
Query = Sequence[tuple[str, str]]

TIMEOUT_S = 30
UNCHECKED = (AttributeError, KeyError, TypeError, ValueError)
"""What the client lets through for a kubeconfig that is YAML, and none of its own kind."""
PATHS = {
    "ConfigMap": ("/api/v1", "configmaps"),
    "Pod": ("/api/v1", "pods"),
    "RayJob": ("/apis/ray.io/v1", "rayjobs"),
}
"""Group version and plural of the kinds that the launcher touches."""


class Cluster:
    """The cluster of a kubeconfig, by default the one in use, seen from one namespace."""

    def __init__(self, namespace: str, kubeconfig_file: Path | None = None) -> None:
        self.namespace = namespace
        configuration = Configuration()
        try:
            _load(configuration, kubeconfig_file)
        except (kubeconfig.ConfigException, OSError, YAMLError, *UNCHECKED) as error:
            file = kubeconfig_file or kubeconfig.KUBE_CONFIG_DEFAULT_LOCATION
            raise ClusterUnreachable(
                f"no cluster: no usable kubeconfig in {file}",
                str(error).replace("\n", " "),
                "Set KUBECONFIG, or start a cluster on this machine with `make cluster`.",
            ) from error
        # One answer per question: whoever waits decides what a failure means.
        configuration.retries = False
        self._client = ApiClient(configuration)

    def create(self, body: Object) -> Object:
        """The object as the API server stored it. Fields it does not know are refused."""
        path = self._path(body["kind"])
        return self._json("POST", path, query=[("fieldValidation", "Strict")], body=body)

    def get(self, kind: str, name: str) -> Object | None:
        """The object, or None where there is none of that name."""
        path = f"{self._path(kind)}/{name}"
        try:
            return self._json("GET", path)
        except ClusterError as error:
            if error.reason == "NotFound":
                return None
            raise

    def list(self, kind: str, labels: dict[str, str]) -> Objects:
        """The objects of a kind that carry all these labels."""
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        answer = self._json("GET", self._path(kind), query=[("labelSelector", selector)])
        return cast(Objects, answer["items"])

    def delete(self, kind: str, name: str) -> None:
        """Have the object deleted, dependants in the background; nothing if it is gone already."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        try:
            self._json("DELETE", f"{self._path(kind)}/{name}", body=body)
        except ClusterError as error:
            if error.reason != "NotFound":
                raise

    def log(self, pod: str, container: str, since_s: int | None = None) -> str:
        """What a container has written so far, or in the last seconds."""
        query = [("container", container)]
        if since_s is not None:
            query.append(("sinceSeconds", str(since_s)))
        response = self._request("GET", f"{self._path('Pod')}/{pod}/log", query=query)
        return cast(bytes, response.read()).decode(errors="replace")

    def follow_log(self, pod: str, container: str) -> Iterator[str]:
        """The lines of a container as they come, until it ends."""
        query = [("container", container), ("follow", "true")]
        response = self._request(
            "GET", f"{self._path('Pod')}/{pod}/log", query=query, timeout_s=None
        )
        rest = b""
        try:
            for chunk in response.response.stream(amt=None):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
        except urllib3.exceptions.HTTPError as error:
            self._unreachable(error)
        if rest:
            yield rest.decode(errors="replace")

    def _path(self, kind: str) -> str:
        group_version, plural = PATHS[kind]
        return f"{group_version}/namespaces/{self.namespace}/{plural}"

    def _json(
        self,
        method: str,
        path: str,
        *,
        query: Query = (),
        body: Object | None = None,
    ) -> Object:
        response = self._request(method, path, query=query, body=body)
        return cast(Object, json.loads(response.read()))

    def _request(
        self,
        method: str,
        path: str,
        *,
        query: Query = (),
        body: Object | None = None,
        timeout_s: int | None = TIMEOUT_S,
    ) -> Any:
        """The client's response. Raises ClusterError for every status from 400 on."""
        serialized = self._client.param_serialize(
            method,
            path,
            query_params=list(query),
            header_params={"Accept": "application/json", "Content-Type": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            response = self._client.call_api(*serialized, _request_timeout=timeout_s)
        except (urllib3.exceptions.HTTPError, ApiException) as error:
            self._unreachable(error)
        if response.status >= 400:
            self._refused(method, path, response.status, response.read())
        return response

    def _unreachable(self, error: Exception) -> NoReturn:
        raise ClusterUnreachable(
            f"the cluster at {self._client.configuration.host} does not answer",
            str(error).replace("\n", " "),
            "Check KUBECONFIG and the network; `make cluster` starts one on this machine.",
        ) from error

    def _refused(self, method: str, path: str, status: int, body: bytes) -> NoReturn:
        """Raise what the API server's Status object says, with the remedy where there is a known one."""
        try:
            answer = json.loads(body)
            reason, message = answer["reason"], answer["message"]
        except (ValueError, KeyError, TypeError):
            reason, message = str(status), body.decode(errors="replace")
        details = [message.strip()]
        # An unknown resource is answered by a Status, an unknown API group by bare text.
        if "could not find the requested resource" in message or message.startswith("404 page"):
            reason = "NoSuchKind"
            details.append(
                "The CRDs of KubeRay are missing: install the operator (`make operator`)."
            )
        elif reason == "Forbidden":
            details.append(
                "Ask for the launcher's Role of the chart (launcher.rbac.subjects) in namespace "
                f"{self.namespace}."
            )
        elif reason == "Unauthorized":
            details.append("The kubeconfig's credentials are not accepted: renew them.")
        raise ClusterError(
            f"the cluster refused {method} {path} ({status} {reason})", *details, reason=reason
        )


def _load(configuration: Configuration, file: Path | None) -> None:
    """The kubeconfig named or in use, else the service account of the pod that we are in."""
    try:
        path = None if file is None else str(file)
        kubeconfig.load_kube_config(config_file=path, client_configuration=configuration)
    except kubeconfig.ConfigException as no_kubeconfig:
        try:
            kubeconfig.load_incluster_config(client_configuration=configuration)
        except kubeconfig.ConfigException:
            raise no_kubeconfig from None
