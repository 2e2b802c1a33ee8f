"""One API server: requests, streams and websockets. The only import of `kubernetes` and urllib3.

No exception of the client leaves this module: each becomes a ClusterError with Kubernetes' reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import urllib3
from kubernetes import config as kubeconfig
from kubernetes.client import Configuration
from kubernetes.client.api_client import ApiClient
from kubernetes.client.exceptions import ApiException
from yaml import YAMLError

from trainyard.errors import ClusterError, ClusterUnreachable

Object = dict[str, Any]
Query = Sequence[tuple[str, str]]

TIMEOUT_S = 30
"""For an answer as a whole."""
SILENCE_S = 120
"""For the next piece of a stream: the API server sends a bookmark each minute into a quiet watch."""
UNCHECKED = (AttributeError, KeyError, TypeError, ValueError)
"""What the client lets through for a kubeconfig that is YAML, and none of its own kind."""
HANDSHAKE = re.compile(r"Handshake status (\d+)")


class Connection:
    """The API server of a kubeconfig, by default of the one in use."""

    def __init__(self, kubeconfig_file: Path | None = None) -> None:
        self._configuration = Configuration()
        try:
            _load(self._configuration, kubeconfig_file)
        except (kubeconfig.ConfigException, OSError, YAMLError, *UNCHECKED) as error:
            file = kubeconfig_file or kubeconfig.KUBE_CONFIG_DEFAULT_LOCATION
            raise ClusterUnreachable(
                f"no cluster: no usable kubeconfig in {file}",
                str(error).replace("\n", " "),
                "Set KUBECONFIG, or start a cluster on this machine with `make cluster`.",
            ) from error
        # One answer per question: whoever waits decides what a failure means.
        self._configuration.retries = False
        # A watch, a log and a question at the same time.
        self._configuration.connection_pool_maxsize = 8
        self._client = ApiClient(self._configuration)

    @property
    def host(self) -> str:
        """Address of the API server."""
        return str(self._configuration.host)

    def json(
        self,
        method: str,
        path: str,
        *,
        query: Query = (),
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """The parsed answer. Raises ClusterError for every status from 400 on."""
        response = self._request(method, path, query, body, content_type, TIMEOUT_S)
        return cast(Object, json.loads(self._read(response)))

    def text(self, path: str, query: Query = ()) -> str:
        """An answer that is no JSON, such as a log."""
        response = self._request("GET", path, query, None, "application/json", TIMEOUT_S)
        return self._read(response).decode(errors="replace")

    def lines(self, path: str, query: Query, silence_s: float = SILENCE_S) -> Iterator[str]:
        """The lines of an answer as they come. Raises ClusterUnreachable when it breaks off."""
        timeouts = (TIMEOUT_S, silence_s)
        response = self._request("GET", path, query, None, "application/json", timeouts)
        rest = b""
        try:
            for chunk in response.response.stream(amt=None):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            self._unreachable(error)
        finally:
            # Not given back to the pool: what is left of the stream would answer the next question.
            response.response.close()
        if rest:
            yield rest.decode(errors="replace")

    def websocket(self, path: str, query: Query, open_with: str) -> Any:
        """What `kubernetes.stream` makes of a connection: its function `open_with` says which kind."""
        from kubernetes.stream import ws_client

        method, url, headers, *_ = self._serialized("GET", path, query, None, "application/json")
        options = {"_preload_content": False, "capture_all": False, "binary": True}
        try:
            return getattr(ws_client, open_with)(
                self._configuration, method, url, headers=headers, **options
            )
        except ApiException as error:
            self._no_websocket(path, error)

    def _no_websocket(self, path: str, error: ApiException) -> NoReturn:
        """Raise what the API server said instead of opening one."""
        text = str(error.reason)
        status = HANDSHAKE.search(text)
        if status is None:
            self._unreachable(error)
        body = re.search(r"b'(\{.*\})", text, re.DOTALL)
        message = body.group(1).replace("\\\\", "\\").replace("\\'", "'") if body else text
        self._refused("GET", path, int(status.group(1)), message.encode())

    def _serialized(
        self, method: str, path: str, query: Query, body: Object | None, content_type: str
    ) -> Any:
        return self._client.param_serialize(
            method,
            path,
            query_params=list(query),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )

    def _request(
        self,
        method: str,
        path: str,
        query: Query,
        body: Object | None,
        content_type: str,
        timeout_s: float | tuple[float, float],
    ) -> Any:
        """The client's response, unread."""
        serialized = self._serialized(method, path, query, body, content_type)
        try:
            response = self._client.call_api(*serialized, _request_timeout=timeout_s)
        except (urllib3.exceptions.HTTPError, ApiException, OSError) as error:
            self._unreachable(error)
        if response.status >= 400:
            self._refused(method, path, response.status, self._read(response))
        return response

    def _read(self, response: Any) -> bytes:
        try:
            return cast(bytes, response.read())
        except (urllib3.exceptions.HTTPError, OSError) as error:
            self._unreachable(error)

    def _unreachable(self, error: Exception) -> NoReturn:
        raise ClusterUnreachable(
            f"the cluster at {self.host} does not answer",
            str(error).replace("\n", " "),
            "Check KUBECONFIG and the network; `make cluster` starts one on this machine.",
        ) from error

    def _refused(self, method: str, path: str, status: int, body: bytes) -> NoReturn:
        """Raise what the API server's Status object says, with the remedy where there is a known one."""
        try:
            answer = json.loads(body)
            reason, message = answer.get("reason") or str(status), answer["message"]
        except (ValueError, KeyError, TypeError, AttributeError):
            reason, message = str(status), body.decode(errors="replace")
        details = [message.strip()]
        # An unknown resource is answered by a Status, an unknown API group by bare text.
        if "could not find the requested resource" in message or message.startswith("404 page"):
            reason = "NoSuchKind"
            details.append(_missing_crd(path))
        elif reason == "Forbidden":
            namespace = re.search(r"/namespaces/([^/]+)", path)
            details.append(
                "Ask for the launcher's Role of the chart (launcher.rbac.subjects)"
                + (f" in namespace {namespace.group(1)}." if namespace else ".")
            )
        elif "unknown field" in message and "/ray.io/" in path:
            details.append(
                "Either the platform names a field that KubeRay does not have, or the cluster's CRDs of "
                "KubeRay are too old for this run: helm does not upgrade them."
            )
        elif reason == "Unauthorized":
            details.append("The kubeconfig's credentials are not accepted: renew them.")
        raise ClusterError(
            f"the cluster refused {method} {path} ({status} {reason})", *details, reason=reason
        )


def _missing_crd(path: str) -> str:
    if "/kueue.x-k8s.io/" in path:
        return (
            "The CRDs of Kueue are missing: install Kueue, or set the platform's queue otherwise."
        )
    return "The CRDs of KubeRay are missing: install the operator (`make operator`)."


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
