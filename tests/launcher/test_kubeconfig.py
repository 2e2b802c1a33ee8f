"""The launcher chooses cluster, user and files of a kubeconfig as kubectl does.

kubectl itself is the judge: `kubectl config view --minify --flatten --raw` over the same files.
"""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.helm_chart import need_tool
from trainyard.cluster.kubeconfig import Access, load_access
from trainyard.errors import ClusterUnreachable, ConfigError

Object = dict[str, Any]

EXEC = {"command": "login", "apiVersion": "client.authentication.k8s.io/v1beta1"}
SERVER = "https://10.0.0.1:6443"


def config(
    cluster: Object | None = None,
    user: Object | None = None,
    *,
    name: str = "x",
    current: str | None = "x",
    namespace: str = "",
) -> str:
    """A kubeconfig with one context, whose cluster and user are called c-NAME and u-NAME."""
    context = {"cluster": f"c-{name}", "user": f"u-{name}"}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": f"c-{name}", "cluster": {"server": SERVER} | (cluster or {})}],
        "users": [{"name": f"u-{name}", "user": user or {"token": name}}],
        "contexts": [
            {"name": name, "context": context | ({"namespace": namespace} if namespace else {})}
        ],
    }
    return yaml.safe_dump(document | ({} if current is None else {"current-context": current}))


FILES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "one file": ("a", {"a": config()}),
    "the first current-context wins": ("a:b", {"a": config(), "b": config(name="z", current="z")}),
    "a context of a later file": (
        "a:b",
        {"a": config(current="z"), "b": config(name="z", current=None)},
    ),
    "current-context of a later file": (
        "a:b",
        {"a": config(current=None), "b": config(name="z", current="z")},
    ),
    "an empty current-context is none": (
        "a:b",
        {"a": config(current=""), "b": config(name="z", current="z")},
    ),
    "the same names in two files": (
        "a:b",
        {
            "a": config(user={"token": "first"}),
            "b": config({"server": "https://second:1"}, {"token": "second"}),
        },
    ),
    "values of one name are not mixed": (
        "a:b",
        {
            "a": config(user={"username": "me"}),
            "b": config({"tls-server-name": "b"}, {"password": "b"}),
        },
    ),
    "missing and empty files": (":missing:empty:a:", {"empty": "", "a": config()}),
    "a file twice": ("a:a", {"a": config()}),
    "files that say nothing": (
        "n:a",
        {"n": "clusters: null\nusers: null\ncontexts: null\n", "a": config()},
    ),
    "unknown keys": (
        "a",
        {"a": config({"colour": "red"}, {"token": "t", "mood": 3}) + "preferences: {}\n"},
    ),
    "a null is an absent value": (
        "a",
        {"a": config({"proxy-url": None}, {"token": "t", "exec": None})},
    ),
    "a date is text": ("a", {"a": config().replace("token: x", "token: 2026-01-01")}),
    "CRLF and a BOM": ("a", {"a": "\ufeff" + config().replace("\n", "\r\n")}),
    "relative files": (
        "in/a:b",
        {
            "in/a": config(
                {"certificate-authority": "ca.crt"},
                {"client-certificate": "../c.crt", "client-key": "./k/key"},
            ),
            "b": config(name="z"),
            "in/ca.crt": "authority",
            "ca.crt": "another",
            "c.crt": "certificate",
            "in/k/key": "key",
        },
    ),
    "data": (
        "a",
        {
            "a": config(
                {"certificate-authority-data": "YXV0aG9y\naXR5"},
                {"client-certificate-data": "YQ==", "client-key-data": "Yg=="},
            )
        },
    ),
    "cluster keys": (
        "a",
        {
            "a": config(
                {
                    "server": "https://rancher/k8s/clusters/c-1/",
                    "proxy-url": "http://me:secret@proxy:3128",
                    "tls-server-name": "kubernetes",
                    "insecure-skip-tls-verify": True,
                }
            )
        },
    ),
    "password": ("a", {"a": config(user={"username": "me", "password": "secret"})}),
    "token file": ("in/a", {"in/a": config(user={"tokenFile": "token"}), "in/token": "t"}),
    "exec plugin": (
        "a",
        {
            "a": config(
                user={"exec": EXEC | {"args": ["a", "b"], "env": [{"name": "A", "value": "b"}]}}
            )
        },
    ),
    "namespace": ("a", {"a": config(namespace="team")}),
    "tilde in a path": (
        "a",
        {"a": config({"certificate-authority": "~/ca.crt"}), "~/ca.crt": "authority"},
    ),
}


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, newline="")


def kubectl_view(*arguments: str) -> Object:
    command = [
        str(need_tool("kubectl")),
        "config",
        "view",
        "--minify",
        "--flatten",
        "--raw",
        "-o",
        "json",
        *arguments,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    found: Object = json.loads(ended.stdout)
    return found


def flattened(access: Access) -> tuple[Object, Object]:
    """The cluster and the user as kubectl prints them, with files as base64."""
    cluster = access.cluster.model_dump(by_alias=True, exclude={"extensions"})
    user = access.user.model_dump(by_alias=True, exclude={"auth_provider"})
    for part in (cluster, user):
        for key in ("certificate-authority", "client-certificate", "client-key"):
            if key in part:
                file, data = part.pop(key), part[f"{key}-data"]
                data = Path(file).read_bytes() if file else data
                part[f"{key}-data"] = base64.b64encode(data).decode()
    # kubectl prints the path of tokenFile as the kubeconfig has it.
    user["tokenFile"] = Path(user["tokenFile"]).name if user["tokenFile"] else ""
    return {k: v for k, v in cluster.items() if v}, {k: v for k, v in user.items() if v}


def exec_without_defaults(user: Object) -> Object:
    if "exec" not in user:
        return user
    given = {key: value for key, value in user["exec"].items() if value}
    given.pop("interactiveMode", None)
    return user | {"exec": json.loads(json.dumps(given))}


@pytest.mark.parametrize("name", FILES)
def test_files_are_merged_as_kubectl_merges_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubeconfig, files = FILES[name]
    write(tmp_path, files)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", kubeconfig)
    expected, access = kubectl_view(), load_access()
    cluster, user = flattened(access)
    assert access.context == expected["current-context"]
    assert cluster == expected["clusters"][0]["cluster"]
    assert exec_without_defaults(user) == exec_without_defaults(expected["users"][0]["user"])


def test_a_context_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a": config(), "b": config({"server": "https://b:1"}, name="z", current=None)})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", "a:b")
    expected = kubectl_view("--context", "z")
    assert load_access("z").cluster.server == expected["clusters"][0]["cluster"]["server"]
    with pytest.raises(ConfigError, match="there is no context 'none'") as raised:
        load_access("none")
    assert raised.value.details == ("Its contexts are: x, z.",)


def test_without_kubeconfig_the_file_in_the_home_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {".kube/config": config()})
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert load_access().cluster.server == kubectl_view()["clusters"][0]["cluster"]["server"]


WRONG = {
    "token: 12": "users.0.user.token: Input should be a valid string",
    "client-certificate-data: '%'": "client-certificate-data: Value error, must be base64",
    "token: a, username: b, password: c": "token and username exclude each other",
    "tokenFile: missing": "tokenFile .*missing cannot be read: No such file",
    "client-certificate: missing, client-key: missing": "client-certificate .*missing cannot be read",
    "client-certificate-data: YQ==": "client-certificate needs client-key",
    "token: a, as: somebody": "impersonation",
    "token: a, as-groups: [b]": "impersonation",
    "auth-provider: {name: gcp}": "auth-provider gcp is not supported: use an exec plugin",
}


@pytest.mark.parametrize("user", WRONG)
def test_credentials_that_kubectl_would_refuse_are_named(user: str, tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(config(user=yaml.safe_load(f"{{{user}}}")))
    with pytest.raises(ClusterUnreachable, match=WRONG[user]) as raised:
        load_access(file=file)
    assert raised.value.exit_code == 3


WRONG_CLUSTERS = {
    "server: ''": "must be a URL",
    "server: 10.0.0.1": "must be a URL",
    "proxy-url: socks5://proxy": "must be http or https",
    "certificate-authority: missing": "certificate-authority .*missing cannot be read",
    "certificate-authority-data: YQ==, insecure-skip-tls-verify: true": "exclude each other",
    "insecure-skip-tls-verify: 'yes'": "should be a valid boolean",
}


@pytest.mark.parametrize("cluster", WRONG_CLUSTERS)
def test_a_cluster_that_cannot_be_used_is_named(cluster: str, tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(config(yaml.safe_load(f"{{{cluster}}}")))
    with pytest.raises(ClusterUnreachable, match=WRONG_CLUSTERS[cluster]):
        load_access(file=file)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("current-context: x", "current-context: z"), "its current-context 'z' does not exist"),
        (("current-context: x", ""), "no current-context is set"),
        (("cluster: c-x\n", "cluster: other\n"), "names cluster 'other', which does not exist"),
        (("user: u-x\n", "user: other\n"), "names user 'other', which does not exist"),
        (("kind: Config", "kind: Pod"), "kind: "),
        (("apiVersion: v1", "- apiVersion: v1\n---"), "it is no mapping, so it is no kubeconfig"),
        (
            ("clusters:", "clusters:\n- {name: c-x, cluster: {server: 'https://a'}}"),
            "names c-x twice",
        ),
        (("current-context: x", "current-context: ["), "while parsing"),
    ],
)
def test_a_kubeconfig_that_names_no_cluster_is_refused(
    tmp_path: Path, change: tuple[str, str], problem: str
) -> None:
    file = tmp_path / "config"
    text = config()
    assert change[0] in text
    file.write_text(text.replace(*change))
    with pytest.raises(ClusterUnreachable, match=problem):
        load_access(file=file)


def test_a_secret_is_not_repeated_in_an_error(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(config(user={"token": ["hunter2"], "client-key-data": "hunter2%"}))
    with pytest.raises(ClusterUnreachable) as raised:
        load_access(file=file)
    assert "hunter2" not in str(raised.value)


def test_a_pod_without_a_kubeconfig_uses_its_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"token": "t", "ca.crt": "c"})
    monkeypatch.setattr("trainyard.cluster.kubeconfig.SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    access = load_access()
    assert (access.cluster.server, access.user.token_file) == (
        "https://[fd00::1]:443",
        str(tmp_path / "token"),
    )
    # A kubeconfig that says something is not passed over, even if what it says is wrong.
    write(tmp_path, {"wrong": "current-context: x"})
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "wrong"))
    with pytest.raises(ClusterUnreachable, match="its current-context 'x' does not exist"):
        load_access()
