"""A kubeconfig's login program (exec plugin): what it is told, what it may print, and every way to fail.

A failure has exit code 3 and names the program; nothing is asked of the server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.helm_chart import need_tool
from trainyard.cluster import exec_plugin
from trainyard.cluster.cluster import Cluster
from trainyard.errors import ClusterError, ClusterUnreachable

Object = dict[str, Any]
API_VERSION = "client.authentication.k8s.io/v1beta1"
EMPTY_LIST = json.dumps({"kind": "List", "metadata": {}, "items": []})


class Server:
    """An API server that answers with an empty list, and the credentials that it was shown."""

    def __init__(self) -> None:
        self.authorizations: list[str] = []
        self.refused: set[str] = set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                shown = self.headers.get("Authorization", "")
                server.authorizations.append(shown)
                self.send_response(401 if shown in server.refused else 200)
                self.end_headers()
                self.wfile.write(EMPTY_LIST.encode())

            def log_message(self, *_: object) -> None:
                """Stay silent."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.http.server_address[1]}"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, server: Server) -> Write:
    """Write a kubeconfig whose login program is a shell script; keys of `exec` can be changed."""

    def write(script: str = "", **changes: Any) -> Path:
        program = tmp_path / "login"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        command = {
            "apiVersion": API_VERSION,
            "command": "./login",
            "interactiveMode": "Never",
        } | changes
        file = tmp_path / "kubeconfig"
        document = {
            "clusters": [{"name": "c", "cluster": {"server": server.address}}],
            "users": [{"name": "u", "user": {"exec": command}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        file.write_text(yaml.safe_dump(document))
        return file

    return write


def answer(**status: str) -> str:
    """A script that prints an ExecCredential."""
    return f"echo '{json.dumps({'kind': 'ExecCredential', 'apiVersion': API_VERSION, 'status': status})}'"


def test_the_token_of_the_program_is_used(write: Write, server: Server) -> None:
    Cluster("team", write(answer(token="secret"))).list("Pod")
    assert server.authorizations == ["Bearer secret"]


FAILURES: dict[str, tuple[str, Object, str]] = {
    "missing": (
        "",
        {"command": "no-such-auth-plugin"},
        "no-such-auth-plugin is not installed, or not on PATH",
    ),
    "missing, with a path": ("", {"command": "./nowhere/login"}, "login is not installed"),
    "install hint": (
        "",
        {"command": "nowhere", "installHint": "brew install nowhere"},
        "brew install nowhere",
    ),
    "fails": ("echo token expired >&2; exit 7", {}, "failed with exit code 7"),
    "its words": ("echo token expired >&2; exit 7", {}, "token expired"),
    "colours": (
        r"printf '\033[31mtoken expired' >&2; exit 7",
        {},
        "       " + " [31mtoken expired",
    ),
    "killed": ("kill -9 $$", {}, "was ended by SIGKILL"),
    "nothing printed": ("true", {}, "its output is not JSON"),
    "no JSON": ("echo hello", {}, "its output is not JSON"),
    "JSON of another kind": ("echo '[]'", {}, "its output has another kind"),
    "another version": (answer(token="t").replace("v1beta1", "v1"), {}, "the kubeconfig expects"),
    "no status": (
        f"""echo '{{"kind": "ExecCredential", "apiVersion": "{API_VERSION}"}}'""",
        {},
        "neither a token",
    ),
    "an empty token": (answer(token=""), {}, "neither a token nor a certificate"),
    "a certificate alone": (answer(clientCertificateData="c"), {}, "a certificate without its key"),
    "no certificate": (
        answer(clientCertificateData="c", clientKeyData="k"),
        {},
        "client certificate and its key",
    ),
    "a token with a line break": (answer(token="a\\nb"), {}, "token is empty, or has spaces"),
    "an expiry that is no time": (
        answer(token="t", expirationTimestamp="soon"),
        {},
        "is no time: 'soon'",
    ),
    "removed version": (
        "",
        {"apiVersion": "client.authentication.k8s.io/v1alpha1"},
        "exec.apiVersion = ",
    ),
    "no version": ("", {"apiVersion": ""}, "exec.apiVersion = ''"),
    "v1 without a mode": (
        "",
        {"apiVersion": f"{API_VERSION[:-5]}", "interactiveMode": ""},
        "exec.interactiveMode",
    ),
    "unknown mode": ("", {"interactiveMode": "Sometimes"}, "exec.interactiveMode = 'Sometimes'"),
    "no command": ("", {"command": ""}, "exec.command is missing"),
    "must ask, and cannot": ("", {"interactiveMode": "Always"}, "standard input is not a terminal"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_program_that_gives_no_credential_ends_the_command(
    name: str, write: Write, server: Server
) -> None:
    script, changes, message = FAILURES[name]
    with pytest.raises(ClusterUnreachable) as raised:
        Cluster("team", write(script, **changes)).list("Pod")
    assert message in str(raised.value)
    assert raised.value.exit_code == 3
    assert server.authorizations == []


def test_a_program_that_does_not_end_is_killed_with_all_that_it_started(
    write: Write, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(exec_plugin, "NOTICE_S", 0.5)
    monkeypatch.setattr(exec_plugin, "LIMIT_S", 1.0)
    script = f"echo open https://login >&2; sleep 600 & echo $! > {tmp_path}/child; wait"
    with pytest.raises(ClusterUnreachable, match="has not ended after 1 s"):
        Cluster("team", write(script))
    assert "waiting for the kubeconfig's login program" in (said := capsys.readouterr().err)
    assert "open https://login" in said
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "Z" not in _state(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert server.authorizations == []


def _state(process: int) -> str:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_the_case_of_a_missing_program_on_the_command_line(write: Write, server: Server) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "trainyard", "list"],
        env=os.environ | {"KUBECONFIG": str(write(command="no-such-auth-plugin"))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout, server.authorizations) == (3, "", [])
    assert ended.stderr.startswith("error: the kubeconfig's login program no-such-auth-plugin")


def test_an_expired_credential_is_renewed_before_the_next_request(
    write: Write, server: Server, tmp_path: Path
) -> None:
    count = f"n=$(cat {tmp_path}/n 2>/dev/null || echo 0); echo $((n + 1)) > {tmp_path}/n"
    expired = answer(token="t'$n'", expirationTimestamp="2020-01-01T00:00:00Z")
    cluster = Cluster("team", write(f"{count}; {expired}"))
    cluster.list("Pod")
    cluster.list("Pod")
    assert len(set(server.authorizations)) == 2
    lasting = answer(token="t'$n'", expirationTimestamp="2999-01-01T00:00:00Z")
    (tmp_path / "n").unlink()
    cluster = Cluster("team", write(f"{count}; {lasting}"))
    cluster.list("Pod")
    cluster.list("Pod")
    assert (tmp_path / "n").read_text() == "1\n"


def test_a_refused_credential_is_renewed_once(write: Write, server: Server, tmp_path: Path) -> None:
    count = f"n=$(cat {tmp_path}/n 2>/dev/null || echo 0); echo $((n + 1)) > {tmp_path}/n"
    cluster = Cluster("team", write(f"{count}; {answer(token=chr(39) + '$n' + chr(39))}"))
    server.refused = {"Bearer 0"}
    assert cluster.list("Pod") == []
    assert server.authorizations == ["Bearer 0", "Bearer 1"]
    server.refused = {"Bearer 1"}
    cluster = Cluster("team", write(answer(token="1")))
    with pytest.raises(ClusterError, match="401"):
        cluster.list("Pod")


def test_the_program_is_told_what_kubectl_tells_it(
    write: Write, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KUBERNETES_EXEC_INFO, arguments, variables, folder and standard input are those of kubectl."""
    monkeypatch.chdir(tmp_path)
    kubectl = str(need_tool("kubectl"))
    script = 'echo "$(echo "$KUBERNETES_EXEC_INFO")|$ONE|$*|$(pwd)|$(cat)" >> told; ' + answer(
        token="t"
    )
    file = write(
        script, provideClusterInfo=True, args=["a b", "c"], env=[{"name": "ONE", "value": "1"}]
    )
    document = yaml.safe_load(file.read_text())
    cluster = document["clusters"][0]["cluster"]
    extension = {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "me"}}
    cluster |= {"tls-server-name": "kubernetes", "extensions": [extension]}
    # kubectl runs the program for https alone.
    cluster |= {
        "server": cluster["server"].replace("http:", "https:"),
        "insecure-skip-tls-verify": True,
    }
    file.write_text(yaml.safe_dump(document))
    subprocess.run(
        [kubectl, "--kubeconfig", str(file), "--request-timeout=2s", "get", "--raw", "/version"],
        stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
    Cluster("team", file)
    # kubectl runs the program once more if the server does not speak TLS.
    kubectl_s, *_, ours = (tmp_path / "told").read_text().splitlines()
    told, expected = ours.split("|"), kubectl_s.split("|")
    assert json.loads(told[0]) == json.loads(expected[0])
    assert told[1:] == expected[1:]


@pytest.mark.parametrize(
    ("user", "shown"),
    [
        ({"token": "mine"}, "Bearer mine"),
        ({"tokenFile": "token"}, "Bearer of-file"),
        ({"username": "me", "password": "b c"}, "Basic bWU6YiBj"),
    ],
)
def test_credentials_of_the_kubeconfig_come_before_the_program(
    write: Write, server: Server, tmp_path: Path, user: Object, shown: str
) -> None:
    file = write("exit 1")
    (tmp_path / "token").write_text("of-file\n")
    document = yaml.safe_load(file.read_text())
    document["users"][0]["user"] |= user
    file.write_text(yaml.safe_dump(document))
    Cluster("team", file).list("Pod")
    assert server.authorizations == [shown]
