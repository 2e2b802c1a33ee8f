"""Read kubeconfig files as kubectl does: merge them, and choose the cluster and the user of a context.

The `kubernetes` package does this too, but of several files it takes the `current-context` of the last one.
The rules here are those of client-go (`tools/clientcmd`); a test compares them with `kubectl config view`.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from trainyard.errors import ClusterUnreachable, ConfigError

DEFAULT_FILE = Path(".kube/config")
"""The kubeconfig in the home folder, which is read if KUBECONFIG is not set."""
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds the credentials of its service account."""
EXEC_EXTENSION = "client.authentication.k8s.io/exec"
"""The extension of a cluster that is passed to an exec plugin."""
PROXY_SCHEMES = ("http", "https")

T = TypeVar("T")


class _KubeconfigLoader(yaml.SafeLoader):
    """Reads YAML as kubectl does: a date is text."""


_KubeconfigLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _without_nulls(value: object) -> object:
    """Leave out keys whose value is null: kubectl treats them as absent."""
    if isinstance(value, dict):
        return {key: each for key, each in value.items() if each is not None}
    return {} if value is None else value


def _bytes_of(value: object) -> object:
    if isinstance(value, str):
        try:
            return base64.b64decode("".join(value.split()), validate=True)
        except binascii.Error as error:
            raise ValueError(f"must be base64: {error}") from error
    return value


Data = Annotated[bytes, BeforeValidator(_bytes_of)]


class _Section(BaseModel):
    """A part of a kubeconfig; unknown keys are ignored, as kubectl ignores them."""

    model_config = ConfigDict(
        frozen=True, strict=True, alias_generator=lambda name: name.replace("_", "-")
    )


class _Extension(_Section):
    name: str = ""
    extension: Any = None


class KubeCluster(_Section):
    """An API server, and how to verify it."""

    server: str = ""
    tls_server_name: str = ""
    insecure_skip_tls_verify: bool = False
    certificate_authority: str = ""
    certificate_authority_data: Data = b""
    proxy_url: str = ""
    disable_compression: bool = False
    extensions: tuple[Annotated[_Extension, BeforeValidator(_without_nulls)], ...] = Field(
        default=(), strict=False
    )


class _Variable(_Section):
    name: str = ""
    value: str = ""


class ExecConfig(_Section):
    """A program that prints the credentials."""

    command: str = ""
    args: tuple[str, ...] = Field(default=(), strict=False)
    env: tuple[Annotated[_Variable, BeforeValidator(_without_nulls)], ...] = Field(
        default=(), strict=False
    )
    api_version: str = Field(default="", alias="apiVersion")
    install_hint: str = Field(default="", alias="installHint")
    provide_cluster_info: bool = Field(default=False, alias="provideClusterInfo")
    interactive_mode: str = Field(default="", alias="interactiveMode")


class _AuthProvider(_Section):
    name: str = ""


class KubeUser(_Section):
    """The credentials of a user."""

    client_certificate: str = ""
    client_certificate_data: Data = b""
    client_key: str = ""
    client_key_data: Data = b""
    token: str = ""
    token_file: str = Field(default="", alias="tokenFile")
    impersonate: str = Field(default="", alias="as")
    impersonate_uid: str = Field(default="", alias="as-uid")
    impersonate_groups: tuple[str, ...] = Field(default=(), alias="as-groups", strict=False)
    impersonate_extra: dict[str, Any] = Field(default={}, alias="as-user-extra")
    username: str = ""
    password: str = ""
    auth_provider: _AuthProvider | None = None
    exec: Annotated[ExecConfig, BeforeValidator(_without_nulls)] | None = None


class KubeContext(_Section):
    """A pair of a cluster and a user."""

    cluster: str = ""
    user: str = ""
    namespace: str = ""


class _NamedCluster(_Section):
    name: str = ""
    cluster: Annotated[KubeCluster, BeforeValidator(_without_nulls)] = KubeCluster()


class _NamedUser(_Section):
    name: str = ""
    user: Annotated[KubeUser, BeforeValidator(_without_nulls)] = KubeUser()


class _NamedContext(_Section):
    name: str = ""
    context: Annotated[KubeContext, BeforeValidator(_without_nulls)] = KubeContext()


class _File(_Section):
    kind: Literal["", "Config"] = ""
    api_version: Literal["", "v1"] = Field(default="", alias="apiVersion")
    current_context: str = ""
    clusters: tuple[Annotated[_NamedCluster, BeforeValidator(_without_nulls)], ...] = Field(
        default=(), strict=False
    )
    users: tuple[Annotated[_NamedUser, BeforeValidator(_without_nulls)], ...] = Field(
        default=(), strict=False
    )
    contexts: tuple[Annotated[_NamedContext, BeforeValidator(_without_nulls)], ...] = Field(
        default=(), strict=False
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """The cluster and the user of the chosen context; all paths in it are absolute."""

    context: str
    """The name of the context; empty for the service account of a pod."""
    cluster: KubeCluster
    user: KubeUser
    files: str
    """The kubeconfig files, as text for error messages."""


def load_access(context: str | None = None, file: Path | None = None) -> Access:
    """Return the access to the API server of a context, by default of `current-context`.

    Reads the given file, else the files of KUBECONFIG, else `~/.kube/config`; without a current context, the
    service account of the pod that this runs in. Raises ConfigError if the given context does not exist, and
    ClusterUnreachable if the kubeconfig cannot be used.
    """
    paths = kubeconfig_files() if file is None else [file]
    files = ":".join(map(str, paths))
    found = [(path, _read(path)) for path in paths if file is not None or path.exists()]
    clusters = _first_of_each(
        [
            (each.name, _absolute_cluster(path, each.cluster))
            for path, one in found
            for each in one.clusters
        ]
    )
    users = _first_of_each(
        [(each.name, _absolute_user(path, each.user)) for path, one in found for each in one.users]
    )
    contexts = _first_of_each(
        [(each.name, each.context) for _, one in found for each in one.contexts]
    )
    chosen = context or next((one.current_context for _, one in found if one.current_context), "")
    if not chosen and _is_in_pod():
        return _service_account()
    there = (
        f"Its contexts are: {', '.join(sorted(contexts))}." if contexts else "It has no contexts."
    )
    if not paths:
        raise unusable("KUBECONFIG", "it lists no file: it is only colons")
    if not found:
        raise unusable(files, "no such file")
    if context is not None and context not in contexts:
        raise ConfigError(f"there is no context {context!r} in {files}", there)
    if not chosen:
        raise unusable(
            files,
            "no current-context is set",
            there,
            "Choose one with --context CONTEXT, or `kubectl config use-context`.",
        )
    if chosen not in contexts:
        raise unusable(files, f"its current-context {chosen!r} does not exist", there)
    return _access(chosen, contexts[chosen], clusters, users, files)


def kubeconfig_files() -> list[Path]:
    """Return the files that KUBECONFIG lists, without empty and repeated names, or `~/.kube/config`.

    `~` is not expanded: kubectl leaves that to the shell.
    """
    listed = os.environ.get("KUBECONFIG", "")
    if not listed:
        return [Path.home() / DEFAULT_FILE]
    return [Path(name) for name in dict.fromkeys(listed.split(os.pathsep)) if name]


def unusable(files: str, *details: str) -> ClusterUnreachable:
    """Return the error that the kubeconfig files cannot be used."""
    return ClusterUnreachable(
        f"no cluster: no usable kubeconfig in {files}",
        *details,
        "Set KUBECONFIG, or start a cluster on this machine with `make cluster`.",
    )


def _read(path: Path) -> _File:
    try:
        document = next(yaml.load_all(path.read_bytes(), Loader=_KubeconfigLoader), None)
        if not isinstance(document, dict | None):
            raise unusable(str(path), "it is no mapping, so it is no kubeconfig")
        parsed = _File.model_validate(_without_nulls(document))
    except OSError as error:
        raise unusable(str(path), str(error.strerror)) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise unusable(str(path), " ".join(str(error).split())) from error
    except ValidationError as error:
        raise unusable(str(path), *(_problem_text(each) for each in error.errors()[:5])) from error
    for kind in ("clusters", "users", "contexts"):
        names = [each.name for each in getattr(parsed, kind)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise unusable(str(path), f"{kind} names {', '.join(twice)} twice")
    return parsed


def _problem_text(problem: Any) -> str:
    # The value is not repeated: it may be a credential.
    return f"{'.'.join(map(str, problem['loc'])) or 'the file'}: {problem['msg']}"


def _first_of_each(named: Sequence[tuple[str, T]]) -> dict[str, T]:
    """Return a dictionary in which the first of several equal names wins."""
    return dict(reversed(named))


def _absolute(file: Path, path: str) -> str:
    """Return a path that a kubeconfig names relative to its folder."""
    return os.path.normpath(file.absolute().parent / path) if path else ""


def _absolute_cluster(file: Path, cluster: KubeCluster) -> KubeCluster:
    return cluster.model_copy(
        update={"certificate_authority": _absolute(file, cluster.certificate_authority)}
    )


def _absolute_user(file: Path, user: KubeUser) -> KubeUser:
    paths = ("client_certificate", "client_key", "token_file")
    changes: dict[str, Any] = {name: _absolute(file, getattr(user, name)) for name in paths}
    if user.exec is not None and os.sep in user.exec.command:
        command = _absolute(file, user.exec.command)
        changes["exec"] = user.exec.model_copy(update={"command": command})
    return user.model_copy(update=changes)


def _access(
    name: str,
    context: KubeContext,
    clusters: dict[str, KubeCluster],
    users: dict[str, KubeUser],
    files: str,
) -> Access:
    """Return the access of a context. Raises ClusterUnreachable with everything that is wrong with it."""
    problems = []
    if context.cluster not in clusters:
        problems.append(f"context {name} names cluster {context.cluster!r}, which does not exist")
    # kubectl would ask for a password, and go on as system:anonymous without a terminal.
    if context.user and context.user not in users:
        problems.append(f"context {name} names user {context.user!r}, which does not exist")
    cluster = clusters.get(context.cluster, KubeCluster())
    user = users.get(context.user, KubeUser())
    if not problems:
        problems = [
            *(f"cluster {context.cluster}: {problem}" for problem in _cluster_problems(cluster)),
            *(f"user {context.user}: {problem}" for problem in _user_problems(user)),
        ]
    if problems:
        raise unusable(files, *problems)
    return Access(context=name, cluster=cluster, user=user, files=files)


def _cluster_problems(cluster: KubeCluster) -> list[str]:
    problems = []
    if (
        urlsplit(cluster.server).scheme not in ("http", "https")
        or not urlsplit(cluster.server).hostname
    ):
        problems.append(f"server = {cluster.server!r}: must be a URL such as https://10.0.0.1:6443")
    scheme = urlsplit(cluster.proxy_url).scheme
    if cluster.proxy_url and scheme not in PROXY_SCHEMES:
        problems.append(
            f"proxy-url has the scheme {scheme!r}: must be {' or '.join(PROXY_SCHEMES)}"
        )
    has_authority = bool(cluster.certificate_authority or cluster.certificate_authority_data)
    if cluster.certificate_authority and cluster.certificate_authority_data:
        problems.append("certificate-authority and certificate-authority-data exclude each other")
    if cluster.insecure_skip_tls_verify and has_authority:
        problems.append("insecure-skip-tls-verify and a certificate authority exclude each other")
    return [*problems, *_unreadable("certificate-authority", cluster.certificate_authority)]


def _user_problems(user: KubeUser) -> list[str]:
    problems = []
    if user.token and (user.username or user.password):
        problems.append("token and username exclude each other")
    for what, path, data in (
        ("client-certificate", user.client_certificate, user.client_certificate_data),
        ("client-key", user.client_key, user.client_key_data),
    ):
        if path and data:
            problems.append(f"{what} and {what}-data exclude each other")
        problems += _unreadable(what, path)
    problems += _unreadable("tokenFile", "" if user.token else user.token_file)
    if has_certificate(user) and not (user.client_key or user.client_key_data):
        problems.append("client-certificate needs client-key")
    if (
        user.impersonate
        or user.impersonate_uid
        or user.impersonate_groups
        or user.impersonate_extra
    ):
        problems.append(
            "`as` (impersonation) is not supported by trainyard: use credentials of that user"
        )
    if user.auth_provider is not None:
        problems.append(
            f"auth-provider {user.auth_provider.name} is not supported: use an exec plugin instead, such as "
            "kubelogin or gke-gcloud-auth-plugin"
        )
    return problems


def _unreadable(what: str, path: str) -> list[str]:
    """Return the problem of a file that cannot be opened, if there is one."""
    if not path:
        return []
    try:
        with Path(path).open("rb"):
            return []
    except OSError as error:
        return [f"{what} {path} cannot be read: {error.strerror}"]


def has_certificate(user: KubeUser) -> bool:
    """Return whether a user has a client certificate."""
    return bool(user.client_certificate or user.client_certificate_data)


def _is_in_pod() -> bool:
    return bool(
        os.environ.get("KUBERNETES_SERVICE_HOST")
        and os.environ.get("KUBERNETES_SERVICE_PORT")
        and (SERVICE_ACCOUNT / "token").is_file()
    )


def _service_account() -> Access:
    """Return the access that a pod has by its service account."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    host = f"[{host}]" if ":" in host else host
    cluster = KubeCluster.model_construct(
        server=f"https://{host}:{port}", certificate_authority=str(SERVICE_ACCOUNT / "ca.crt")
    )
    user = KubeUser.model_construct(token_file=str(SERVICE_ACCOUNT / "token"))
    return Access(context="", cluster=cluster, user=user, files=str(SERVICE_ACCOUNT))
