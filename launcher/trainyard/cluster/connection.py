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
"""Timeout in seconds for a whole response."""
SILENCE_S = 120
"""Timeout in seconds for the next piece of a stream; a watch without events gets a bookmark every minute."""
UNCHECKED = (AttributeError, KeyError, TypeError, ValueError)
"""The errors that the client raises for a YAML file that is not a kubeconfig."""
HANDSHAKE = re.compile(r"Handshake status (\d+)")


class Connection:
    """The connection to the API server of a kubeconfig, by default of the current one."""

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
        # No hidden retries: `follow` and the callers decide what a failure means.
        self._configuration.retries = False
        # A watch, a log and a request run at the same time.
        self._configuration.connection_pool_maxsize = 8
        self._client = ApiClient(self._configuration)

    @property
    def host(self) -> str:
        """The address of the API server."""
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
        """Send a request and return the parsed response. Raises ClusterError for a status of 400 or more."""
        response = self._request(method, path, query, body, content_type, TIMEOUT_S)
        return cast(Object, json.loads(self._read(response)))

    def text(self, path: str, query: Query = ()) -> str:
        """Return a response that is plain text, such as a log."""
        response = self._request("GET", path, query, None, "application/json", TIMEOUT_S)
        return self._read(response).decode(errors="replace")

    def lines(self, path: str, query: Query, silence_s: float = SILENCE_S) -> Iterator[str]:
        """Yield the lines of a response as they arrive. Raises ClusterUnreachable if it breaks off."""
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
            # Not returned to the pool: the rest of the stream would be read as the next response.
            response.response.close()
        if rest:
            yield rest.decode(errors="replace")

    def websocket(self, path: str, query: Query, open_with: str) -> Any:
        """Open a websocket with the function `open_with` of the client's `ws_client` module."""
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
        """Raise the error with which the API server refused a websocket."""
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
        """Send a request and return the client's response, whose body is not read yet."""
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
        """Raise a ClusterError from the API server's Status object, with a remedy for known reasons."""
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
    """Load the named or current kubeconfig, else the service account of the pod this runs in."""
    try:
        path = None if file is None else str(file)
        kubeconfig.load_kube_config(config_file=path, client_configuration=configuration)
    except kubeconfig.ConfigException as no_kubeconfig:
        try:
            kubeconfig.load_incluster_config(client_configuration=configuration)
        except kubeconfig.ConfigException:
            raise no_kubeconfig from None
