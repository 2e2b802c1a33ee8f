"""One API server: requests, streams and websockets. The only import of `kubernetes` and urllib3.

No exception of the client leaves this module: each becomes a ClusterError with Kubernetes' reason.
"""

from __future__ import annotations

import ipaddress
import json
import re
import shutil
import ssl
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast
from urllib.parse import unquote, urlsplit

import urllib3

from trainyard.cluster.exec_plugin import Credential, ExecPlugin
from trainyard.cluster.kubeconfig import Access, has_certificate, load_access, unusable
from trainyard.cluster.partial_import import partial_import
from trainyard.errors import ClusterError, ClusterUnreachable

with partial_import("kubernetes"):
    from kubernetes.client import Configuration
    from kubernetes.client.api_client import ApiClient
    from kubernetes.client.exceptions import ApiException

Object = dict[str, Any]
Query = Sequence[tuple[str, str]]

TIMEOUT_S = 30
"""Timeout in seconds for a whole response."""
SILENCE_S = 120
"""Timeout in seconds for the next piece of a stream; a watch without events gets a bookmark every minute."""
HANDSHAKE = re.compile(r"Handshake status (\d+)")


class Connection:
    """The connection to the API server of a kubeconfig context, by default of the current one."""

    def __init__(self, kubeconfig_file: Path | None = None, context: str | None = None) -> None:
        self._access = load_access(context, kubeconfig_file)
        self._plugin = _plugin_of(self._access)
        self._credential: Credential | None = None
        self._folder: Path | None = None
        self._configuration = self._configured()
        self._client = ApiClient(self._configuration)
        self._refresh()

    @property
    def host(self) -> str:
        """The address of the API server."""
        return str(self._configuration.host)

    @property
    def context(self) -> str:
        """The name of the kubeconfig context; empty for the service account of a pod."""
        return self._access.context

    def _configured(self) -> Configuration:
        """Return the client's configuration with all that the kubeconfig itself says."""
        cluster, user = self._access.cluster, self._access.user
        configuration = Configuration()
        configuration.host = cluster.server.rstrip("/")
        # No hidden retries: `follow` and the callers decide what a failure means.
        configuration.retries = False
        # A watch, a log and a request run at the same time.
        configuration.connection_pool_maxsize = 8
        configuration.verify_ssl = not cluster.insecure_skip_tls_verify
        if cluster.insecure_skip_tls_verify:
            # The kubeconfig has chosen it: a warning for each request would say nothing new.
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        configuration.tls_server_name = cluster.tls_server_name or None
        configuration.ssl_ca_cert = (
            self._file("ca.crt", cluster.certificate_authority_data)
            or cluster.certificate_authority
            or None
        )
        if has_certificate(user):
            configuration.cert_file = (
                self._file("client.crt", user.client_certificate_data) or user.client_certificate
            )
            configuration.key_file = (
                self._file("client.key", user.client_key_data) or user.client_key
            )
        _set_proxy(configuration, cluster.proxy_url)
        if user.username or user.password:
            basic = urllib3.make_headers(basic_auth=f"{user.username}:{user.password}")
            configuration.api_key["BearerToken"] = basic["authorization"]
        elif user.token:
            configuration.api_key["BearerToken"] = self._bearer(user.token)
        self._check_certificates(configuration)
        return configuration

    def _refresh(self) -> None:
        """Renew the credential if it has expired: before each request, since a watch lasts longer."""
        user = self._access.user
        if self._plugin is not None:
            self._use(self._plugin.credential())
        elif user.token_file and not user.token:
            token = self._bearer(self._token_of_file(user.token_file))
            self._configuration.api_key["BearerToken"] = token

    def _use(self, credential: Credential) -> None:
        """Use what the exec plugin has printed for all further requests."""
        if credential is self._credential:
            return
        self._credential = credential
        if credential.token:
            self._configuration.api_key["BearerToken"] = self._bearer(credential.token)
        if credential.certificate:
            self._configuration.cert_file = self._file(
                "client.crt", credential.certificate.encode()
            )
            self._configuration.key_file = self._file("client.key", credential.key.encode())
            self._check_certificates(self._configuration)
            self._client = ApiClient(self._configuration)

    def _file(self, name: str, content: bytes) -> str:
        """Write a certificate or a key into a private folder and return its path; empty without content."""
        if not content:
            return ""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="trainyard-"))
            # When the connection is no longer used, or when the program ends.
            weakref.finalize(self, shutil.rmtree, self._folder)
        path = self._folder / name
        path.write_bytes(content)
        return str(path)

    def _token_of_file(self, path: str) -> str:
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise unusable(
                self._access.files, f"tokenFile {path} cannot be read: {error}"
            ) from error

    def _bearer(self, token: str) -> str:
        """Return the header with a token. Raises ClusterUnreachable if no header can hold it."""
        token = token.strip()
        if not re.fullmatch(r"[!-~]+", token):
            raise unusable(
                self._access.files,
                "the token is empty, or has spaces or other characters than ASCII",
            )
        return f"Bearer {token}"

    def _check_certificates(self, configuration: Configuration) -> None:
        """Raise ClusterUnreachable if a certificate or a key is not valid: the client would not say which."""
        try:
            context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        except (ssl.SSLError, OSError) as error:
            raise unusable(
                self._access.files, f"the certificate authority is no certificate: {error}"
            ) from error
        if configuration.cert_file:
            try:
                context.load_cert_chain(
                    configuration.cert_file, configuration.key_file, password=""
                )
            except (ssl.SSLError, OSError, ValueError) as error:
                raise unusable(
                    self._access.files,
                    f"the client certificate and its key cannot be used: {error}",
                ) from error

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
        with partial_import("kubernetes"):
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
        self._refresh()
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
        if response.status == 401 and self._is_renewed():
            return self._request(method, path, query, body, content_type, timeout_s)
        if response.status >= 400:
            self._refused(method, path, response.status, self._read(response))
        return response

    def _is_renewed(self) -> bool:
        """Run the exec plugin again after a refusal; return whether it printed another credential."""
        if self._plugin is None or self._credential is None:
            return False
        refused = self._credential
        self._use(self._plugin.renew(refused))
        return self._credential != refused

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
    if "/kueue.x-k8s.io" in path:
        return (
            "The CRDs of Kueue are missing: install Kueue, or set the platform's queue otherwise."
        )
    return "The CRDs of KubeRay are missing: install the operator (`make operator`)."


def _plugin_of(access: Access) -> ExecPlugin | None:
    """Return the exec plugin of a user; None if the kubeconfig itself has credentials, which come first."""
    user = access.user
    if user.exec is None or user.token or user.token_file or user.username or has_certificate(user):
        return None
    return ExecPlugin(user.exec, access.cluster, access.context)


def _set_proxy(configuration: Configuration, proxy_url: str) -> None:
    """Set the proxy of the kubeconfig, which NO_PROXY does not concern, or else that of the environment."""
    proxy = urlsplit(proxy_url)
    if proxy_url:
        configuration.proxy = proxy_url
        configuration.no_proxy = None
    elif _is_loopback(urlsplit(configuration.host).hostname or ""):
        # As kubectl does: no proxy reaches this machine's own address.
        configuration.proxy = None
    if proxy.username is not None:
        basic = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
        configuration.proxy_headers = urllib3.make_headers(proxy_basic_auth=basic)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
