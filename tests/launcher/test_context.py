"""Each command reaches the cluster of `--context`, and names it before it changes anything there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import typer
import yaml

from trainyard.cli.app import app
from trainyard.diagnosis.causes import kuberay, kueue
from trainyard.diagnosis.failure import Match
from trainyard.diagnosis.snapshot import Snapshot, parse_time
from trainyard.errors import ConfigError
from trainyard.run import Run

ROOT = Path(__file__).resolve().parents[2]
PLATFORM = f"--platform={ROOT / 'launcher/trainyard/platform.yaml'}"
DIGITS = str(ROOT / "examples/digits.yaml")


@pytest.fixture
def two_clusters(tmp_path: Path) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The environment with two kubeconfigs, each with a current context, and the clusters that were asked."""
    asked: list[str] = []
    servers = []
    for name in ("first", "second"):

        class Handler(BaseHTTPRequestHandler):
            cluster = name

            def do_GET(self) -> None:
                is_one = "/rayjobs/" in self.path or "/configmaps/" in self.path
                self.answer(404 if is_one else 200, "NotFound")

            def do_POST(self) -> None:
                self.answer(403, "Forbidden")

            def answer(self, code: int, reason: str) -> None:
                asked.append(self.cluster)
                status = {"kind": "Status", "code": code, "reason": reason, "message": "no"}
                self.send_response(code)
                self.end_headers()
                self.wfile.write(
                    json.dumps({"metadata": {}, "items": []} if code == 200 else status).encode()
                )

            def log_message(self, *_: object) -> None:
                """Stay silent."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = {
            "clusters": [
                {"name": name, "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
            ],
            "users": [{"name": name, "user": {"token": name}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "current-context": name,
        }
        (tmp_path / name).write_text(yaml.safe_dump(config))
    yield os.environ | {"KUBECONFIG": f"{tmp_path}/first:{tmp_path}/second"}, asked
    for server in servers:
        server.shutdown()
        server.server_close()


def trainyard(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainyard", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_current_context_of_the_first_file_is_asked(
    two_clusters: tuple[dict[str, str], list[str]],
) -> None:
    environment, asked = two_clusters
    assert trainyard(environment, "list").returncode == 0
    assert set(asked) == {"first"}


CHANGING = {
    "stop": ["digits"],
    "suspend": ["digits"],
    "resume": ["digits"],
    "delete": ["digits", "--yes"],
    "submit": [DIGITS, PLATFORM, "--detach"],
    "sweep": [DIGITS, "train.seed=1,2", PLATFORM, "--json"],
    "drill": ["worker-killed", DIGITS, PLATFORM, "--json"],
    "soak": [DIGITS, "--minutes=1", PLATFORM],
    "reproduce": ["digits"],
    "preflight": [PLATFORM, "--json"],
    "cp": ["digits:"],
    "explain": ["digits", "--json"],
    "status": ["digits", "--json"],
}
"""Commands that create or delete something, if only a pod that reads a run's folder."""


@pytest.mark.parametrize("command", CHANGING)
def test_a_command_that_changes_something_names_the_cluster_first(
    command: str, two_clusters: tuple[dict[str, str], list[str]]
) -> None:
    environment, asked = two_clusters
    ended = trainyard(environment, command, *CHANGING[command], "--context=second", "-n", "team")
    assert set(asked) == {"second"}, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("cluster: ")]
    assert line.endswith("(context second), namespace team")
    assert "cluster: " not in ended.stdout


def leaves(
    group: typer.main.TyperGroup, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, set[str]]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, (*path, name))
        else:
            yield " ".join((*path, name)), {word for each in command.params for word in each.opts}


def test_each_command_with_a_namespace_has_a_context() -> None:
    options = dict(leaves(typer.main.get_command(app)))  # type: ignore[arg-type]
    assert len(options) > 25
    assert {name for name, words in options.items() if "--namespace" in words} == {
        name for name, words in options.items() if "--context" in words
    }
    assert {"--namespace"} <= options["stop"] & options["dashboard"] & options["compare"]


def test_a_message_repeats_the_context(two_clusters: tuple[dict[str, str], list[str]]) -> None:
    environment, _ = two_clusters
    ended = trainyard(environment, "suspend", "digits", "--context", "second", "-n", "team")
    assert ended.returncode == 2
    assert "`trainyard status digits -n team --context second`" in ended.stderr


@pytest.mark.parametrize("known", [kueue.suspended, kuberay.validation_failed])
def test_the_commands_of_a_remedy_repeat_the_context(known: object) -> None:
    snapshot = Snapshot(
        run="digits", namespace="team", now=parse_time("2026-01-01T00:00:00Z"), context="my two"
    )
    remedy = known.remedy_for(snapshot, Match(cause="", evidence=()))  # type: ignore[attr-defined]
    assert "digits -n team --context 'my two'`" in remedy


def test_a_run_of_the_python_api_has_a_context(tmp_path: Path) -> None:
    assert repr(Run("digits", context="x")) == "Run('digits', namespace='trainyard', context='x')"
    with pytest.raises(ConfigError, match="has both context = x and storage"):
        Run("digits", storage=tmp_path, context="x")
