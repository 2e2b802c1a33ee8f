"""Every answer of an API server becomes a ClusterError with Kubernetes' reason and a remedy.

The answers are those of a real API server, replayed over HTTP; tests/e2e meets the server itself.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard.cluster.cluster import Cluster
from trainyard.errors import ClusterError, ClusterUnreachable

Object = dict[str, Any]


def status_object(code: int, reason: str, message: str) -> str:
    return json.dumps({"kind": "Status", "code": code, "reason": reason, "message": message})


def kubeconfig(path: Path, server: str) -> Path:
    named = {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_text(
        yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "current-context": "x"} | named)
    )
    return path


@pytest.fixture
def answering(
    tmp_path: Path,
) -> Iterator[Callable[[int, str], tuple[Cluster, list[tuple[str, Object | None]]]]]:
    """A cluster whose API server gives one answer to everything, and the requests that it got."""
    servers: list[ThreadingHTTPServer] = []

    def answer(code: int, body: str) -> tuple[Cluster, list[tuple[str, Object | None]]]:
        requests: list[tuple[str, Object | None]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                sent = json.loads(self.rfile.read(length)) if length else None
                requests.append((f"{self.command} {self.path}", sent))
                self.send_response(code)
                self.end_headers()
                self.wfile.write(body.encode())

            do_POST = do_DELETE = do_PATCH = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Stay silent."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        return Cluster("team", kubeconfig(tmp_path / "kubeconfig", address)), requests

    yield answer
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[..., tuple[Cluster, list[str]]]]:
    """A cluster whose API server gives these answers, one after the other, and what it was asked."""
    servers: list[ThreadingHTTPServer] = []

    def script(*answers: tuple[int, str]) -> tuple[Cluster, list[str]]:
        left, requests = list(answers), list[str]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append(self.path)
                code, body = left.pop(0)
                self.send_response(code)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                """Stay silent."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        return Cluster("team", kubeconfig(tmp_path / "kubeconfig", address)), requests

    yield script
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("code", "body", "reason", "remedy"),
    [
        (403, status_object(403, "Forbidden", "cannot create"), "Forbidden", "rbac.subjects"),
        (401, status_object(401, "Unauthorized", "Unauthorized"), "Unauthorized", "renew them"),
        (404, "404 page not found\n", "NoSuchKind", "make operator"),
        (
            404,
            status_object(404, "NotFound", "the server could not find the requested resource"),
            "NoSuchKind",
            "make operator",
        ),
        (409, status_object(409, "AlreadyExists", "digits exists"), "AlreadyExists", "exists"),
        (422, status_object(422, "Invalid", "spec.x: bad"), "Invalid", "spec.x: bad"),
        (400, status_object(400, "BadRequest", 'unknown field "spec.x"'), "BadRequest", "spec.x"),
        (500, "internal", "500", "internal"),
    ],
)
def test_a_refusal_keeps_reason_and_message_and_names_the_remedy(
    answering: Callable[..., Any], code: int, body: str, reason: str, remedy: str
) -> None:
    cluster, _ = answering(code, body)
    with pytest.raises(ClusterError, match=f"{code} {reason}") as raised:
        cluster.create({"kind": "RayJob", "metadata": {"name": "digits"}})
    assert raised.value.reason == reason
    assert remedy in str(raised.value)


def test_what_is_not_there_is_none_and_its_deletion_is_nothing(
    answering: Callable[..., Any],
) -> None:
    cluster, requests = answering(404, status_object(404, "NotFound", 'rayjobs "x" not found'))
    assert cluster.get("RayJob", "x") is None
    cluster.delete("RayJob", "x")
    assert [request for request, _ in requests] == [
        "GET /apis/ray.io/v1/namespaces/team/rayjobs/x",
        "DELETE /apis/ray.io/v1/namespaces/team/rayjobs/x",
    ]


def test_unknown_fields_are_to_be_refused_by_the_server(answering: Callable[..., Any]) -> None:
    cluster, requests = answering(201, "{}")
    body = {"kind": "RayJob", "metadata": {"name": "digits"}}
    cluster.create(body)
    assert requests == [
        ("POST /apis/ray.io/v1/namespaces/team/rayjobs?fieldValidation=Strict", body)
    ]


def test_labels_become_a_selector(answering: Callable[..., Any]) -> None:
    cluster, requests = answering(200, json.dumps({"items": [{"kind": "Pod"}], "metadata": {}}))
    assert cluster.list("Pod", {"a": "1", "b": None}, fields="status.phase=Pending") == [
        {"kind": "Pod"}
    ]
    assert "/pods?labelSelector=a%3D1%2Cb&fieldSelector=status.phase%3DPending&" in requests[0][0]


@pytest.mark.parametrize(
    ("kind", "everywhere", "path"),
    [
        ("Pod", False, "/api/v1/namespaces/team/pods"),
        ("Pod", True, "/api/v1/pods"),
        ("Node", False, "/api/v1/nodes"),
        ("RayCluster", False, "/apis/ray.io/v1/namespaces/team/rayclusters"),
        ("CustomResourceDefinition", False, "/apis/apiextensions.k8s.io/v1/customresource"),
    ],
)
def test_each_kind_has_its_place(
    answering: Callable[..., Any], kind: str, everywhere: bool, path: str
) -> None:
    cluster, requests = answering(200, json.dumps({"items": [], "metadata": {}}))
    assert cluster.list(kind, everywhere=everywhere) == []
    assert requests[0][0].startswith(f"GET {path}")


def test_a_kind_that_is_none_of_ours_is_named(answering: Callable[..., Any]) -> None:
    cluster, requests = answering(200, "{}")
    with pytest.raises(ClusterError, match="no objects of kind Teapot"):
        cluster.list("Teapot")
    assert requests == []


def page(names: str, token: str = "") -> str:
    return json.dumps({"items": list(names), "metadata": {"continue": token}})


def test_a_long_list_comes_page_by_page(scripted: Callable[..., Any]) -> None:
    cluster, requests = scripted(
        (200, page("abc", "t1")), (200, page("def", "t2")), (200, page("g"))
    )
    assert cluster.list("Pod") == list("abcdefg")
    assert [request.partition("continue=")[2] for request in requests] == ["", "t1", "t2"]


def test_what_the_server_remembers_is_enough_for_an_overview(scripted: Callable[..., Any]) -> None:
    cluster, requests = scripted((200, page("abc", "t1")), (200, page("d")))
    assert cluster.list("Pod", cached=True) == list("abcd")
    assert "resourceVersion=0" in requests[0]
    assert "resourceVersion" not in requests[1]  # the token holds one


def test_no_more_pages_are_asked_for_than_are_wanted(scripted: Callable[..., Any]) -> None:
    cluster, requests = scripted((200, page("abc", "t1")))
    assert cluster.list("Pod", limit=3) == list("abc")
    assert "limit=3" in requests[0]


def test_a_forgotten_page_means_all_at_once(scripted: Callable[..., Any]) -> None:
    expired = status_object(410, "Expired", "the continue token is too old")
    cluster, requests = scripted((200, page("abc", "t1")), (410, expired), (200, page("abcdx")))
    assert cluster.list("Pod") == list("abcdx")
    assert "limit" not in requests[-1]


def event(kind: str, body: Object) -> str:
    return json.dumps({"type": kind, "object": body}) + "\n"


def test_a_watch_gives_events_and_ends_with_the_server_s_answer(
    scripted: Callable[..., Any],
) -> None:
    cluster, requests = scripted((200, event("ADDED", {"a": 1}) + event("BOOKMARK", {})))
    events = cluster.watch("RayJob", fields="metadata.name=x", resource_version="7")
    assert [found["type"] for found in events] == ["ADDED", "BOOKMARK"]
    for words in ("watch=true", "allowWatchBookmarks=true", "resourceVersion=7", "timeoutSeconds="):
        assert words in requests[0]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((200, event("ERROR", {"code": 410, "reason": "Gone", "message": "too old"})), "Expired"),
        ((410, status_object(410, "Expired", "too old")), "Expired"),
        ((200, event("ERROR", {"code": 500, "reason": "InternalError"})), "InternalError"),
        ((200, '{"type": "ADD'), ""),
    ],
)
def test_a_watch_that_cannot_go_on_says_why(
    scripted: Callable[..., Any], answer: tuple[int, str], reason: str
) -> None:
    cluster, _ = scripted(answer)
    with pytest.raises(ClusterError) as raised:
        list(cluster.watch("RayJob", resource_version="7"))
    assert raised.value.reason == reason


def test_a_patch_is_a_merge_patch(answering: Callable[..., Any]) -> None:
    cluster, requests = answering(200, "{}")
    cluster.patch("RayJob", "digits", {"spec": {"suspend": True}})
    ((request, body),) = requests
    assert request.startswith("PATCH /apis/ray.io/v1/namespaces/team/rayjobs/digits?")
    assert body == {"spec": {"suspend": True}}


def test_rights_are_asked_for_by_resource(answering: Callable[..., Any]) -> None:
    cluster, requests = answering(201, json.dumps({"status": {"allowed": True}}))
    assert cluster.can_i("create", "RayJob")
    assert requests[0][1]["spec"]["resourceAttributes"] == {
        "verb": "create", "group": "ray.io", "resource": "rayjobs", "namespace": "team"
    }  # fmt: skip


def test_a_dry_run_changes_nothing(answering: Callable[..., Any]) -> None:
    cluster, requests = answering(201, "{}")
    cluster.create({"kind": "RayJob", "metadata": {"name": "digits"}}, dry_run=True)
    assert "dryRun=All" in requests[0][0]


def test_a_followed_log_comes_line_by_line(answering: Callable[..., Any]) -> None:
    cluster, requests = answering(200, "t one\nt two\nt three")
    followed = cluster.follow_log("head", "ray-head", tail_lines=3)
    assert list(followed) == ["t one", "t two", "t three"]
    assert "follow=true&timestamps=true&tailLines=3" in requests[0][0]


@pytest.mark.parametrize("content", [b"a: [", b"[]", b"clusters: 3", b"\xff"])
def test_a_kubeconfig_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "kubeconfig"
    file.write_bytes(content)
    with pytest.raises(ClusterUnreachable, match=f"no usable kubeconfig in {file}"):
        Cluster("team", file)


def test_a_server_that_is_not_there_is_unreachable(tmp_path: Path) -> None:
    nowhere = kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:1")
    with pytest.raises(ClusterUnreachable, match="does not answer"):
        Cluster("team", nowhere).get("RayJob", "x")


def test_the_proxy_of_the_kubeconfig_is_used_whatever_the_environment_says(
    answering: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct, requests = answering(200, "{}")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    file = kubeconfig(tmp_path / "proxied", "http://api.invalid")
    document = yaml.safe_load(file.read_text())
    document["clusters"][0]["cluster"]["proxy-url"] = direct.host.replace("//", "//me:a%20b@")
    file.write_text(yaml.safe_dump(document))
    assert Cluster("team", file).version() == {}
    assert requests[0][0] == "GET http://api.invalid/version"
    # As with kubectl, this machine's own address needs no proxy.
    monkeypatch.delenv("NO_PROXY")
    direct.version()
    fresh = kubeconfig(tmp_path / "direct", direct.host)
    assert Cluster("team", fresh).version() == {}


def test_a_token_file_is_read_again_for_each_request(
    answering: Callable[..., Any], tmp_path: Path
) -> None:
    direct, _ = answering(200, "{}")
    file = kubeconfig(tmp_path / "with-file", direct.host)
    document = yaml.safe_load(file.read_text())
    document["users"][0]["user"] = {"tokenFile": "token"}
    file.write_text(yaml.safe_dump(document))
    (tmp_path / "token").write_text("one\n")
    cluster = Cluster("team", file)
    cluster.version()
    for change in (lambda: (tmp_path / "token").write_text(""), (tmp_path / "token").unlink):
        change()
        with pytest.raises(ClusterUnreachable, match="no usable kubeconfig"):
            cluster.version()
