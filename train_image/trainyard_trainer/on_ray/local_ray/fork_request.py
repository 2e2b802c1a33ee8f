"""What a client of a fork server asks for, and why a forked child could not be it."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import struct
import sys
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from trainyard_trainer.on_ray.local_ray.forkable import cause_not_to_fork
from trainyard_trainer.run_files.unix_sockets import peer_of
from trainyard_trainer.run_files.warm.load_variables import first_difference

READ_S = 10.0
"""Seconds within which a client must have sent its whole request."""

Request = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnvironment:
    """The environment of the driver, for a Ray that was started before the driver had it."""

    before: dict[str, str]
    """The environment with which the driver has started Ray."""
    now: dict[str, str]

    def of_worker(self, environment: dict[str, str]) -> dict[str, str]:
        """Return the environment of a worker that the raylet starts with `environment`."""
        changes = {
            name: value for name, value in environment.items() if self.before.get(name) != value
        }
        return self.now | changes


class WorkerRequest:
    """What a child needs to know to become the worker that a client stands for."""

    def __init__(self, request: Request, streams: list[int], client: int) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--serialized-runtime-env-context", default="{}")
        parser.add_argument("--language", default="PYTHON")
        known, arguments = parser.parse_known_args(request["argv"])
        self.runtime_env: dict[str, Any] = json.loads(known.serialized_runtime_env_context)
        self.language: str = known.language
        self.flags = [each for each in arguments[:2] if re.fullmatch("-[sS]", each)]
        self.arguments: list[str] = arguments[len(self.flags) :]
        self.environment: dict[str, str] = dict(request["environ"])
        for name, value in (self.runtime_env.get("env_vars") or {}).items():
            self.environment[name] = expanded(value, self.environment)
        self.folder: str = request["cwd"]
        self.signal_mask: list[int] = request["signal_mask"]
        self.umask: int = request["umask"]
        self.streams = streams
        self.client = client


def expanded(value: str, environment: dict[str, str]) -> str:
    """Return a value in which `$NAME` is replaced, as `ray._private.utils.update_envs` does.

    `${NAME}` without such a variable becomes empty.
    """

    def replace(match: re.Match[str]) -> str:
        return environment.get(match[1] or match[2], match[0])

    text = re.sub(r"\$(?:(\w+)|\{([^}]*)\})", replace, value)
    return re.sub(r"\$\{[A-Z0-9_]+\}", "", text)


def receive(client: socket.socket) -> tuple[Request, list[int], int]:
    """Receive a message, its file descriptors and the process id of its sender, of the same user."""
    process, user = peer_of(client)
    if user != os.getuid():
        raise ValueError("the client belongs to another user")
    client.settimeout(READ_S)
    head, streams, _, _ = socket.recv_fds(client, 4, 3)
    (left,) = struct.unpack("I", head)
    parts = []
    while left:
        part = client.recv(left)
        if not part:
            raise EOFError
        parts.append(part)
        left -= len(part)
    client.settimeout(None)
    return json.loads(b"".join(parts)), list(streams), process


@dataclass(frozen=True, slots=True)
class ForkedProgram:
    """What the children of a fork server run."""

    ending: str
    """The end of the first argument of their clients."""
    may_differ: Set[str] = frozenset()
    """Variables that the program reads when it needs them, although others read them at load."""
    has_group: bool = False
    """Each child leads a process group of its own, and its client's signals go to all processes of it."""


RAY_WORKER = ForkedProgram("/default_worker.py")


def cause_not_to_run(
    request: WorkerRequest, environment: dict[str, str], program: ForkedProgram = RAY_WORKER
) -> str | None:
    """Return why a child of this process would not be the process that a client stands for, or None.

    `environment` is the one with which this process has loaded its libraries.
    """
    for key in ("command_prefix", "override_worker_entrypoint", "java_jars"):
        if request.runtime_env.get(key):
            return f"its runtime environment has {key}"
    if request.runtime_env.get("py_executable", sys.executable) != sys.executable:
        return "its runtime environment has a Python of its own"
    if request.language != "PYTHON" or not request.arguments[0].endswith(program.ending):
        return f"it is no Python worker: {request.language} {request.arguments[0]}"
    if request.flags != own_flags():
        return f"it starts Python with {' '.join(request.flags)}"
    if name := first_difference(environment, request.environment, program.may_differ):
        return f"{name} is read when a library is loaded, and differs"
    return cause_not_to_fork()


def own_flags() -> list[str]:
    """Return the options of this Python for site-packages, in Ray's order."""
    return ["-S"] * sys.flags.no_site + ["-s"] * sys.flags.no_user_site
