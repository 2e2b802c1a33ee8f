"""What commands ask of a running cluster: is a part ready, is a kind known, what does the API server have."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from layout import ClusterError, Home
from machine import run
from parts import Part
from processes import Ledger

Object = dict[str, Any]


def say(message: str) -> None:
    print(f"cluster: {message}", file=sys.stderr, flush=True)


def kubectl(home: Home, *arguments: str, stdin: str | None = None) -> str:
    return run(home.bin / "kubectl", f"--kubeconfig={home.kubeconfig}", *arguments, stdin=stdin)


def apply(home: Home, manifests: Sequence[Object]) -> None:
    """Create objects, or change them, on the server's side: some are too big for kubectl's annotation."""
    content = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    kubectl(home, "apply", "--server-side", "--filename", "-", stdin=content)


def are_established(home: Home) -> bool:
    """Whether the API server knows all kinds. `kubectl wait` fails on one that has no conditions yet."""
    crds = json.loads(kubectl(home, "get", "customresourcedefinitions", "--output=json"))["items"]
    return all(
        any(
            (condition["type"], condition["status"]) == ("Established", "True")
            for condition in crd.get("status", {}).get("conditions") or ()
        )
        for crd in crds
    )


def health(address: str) -> str:
    """Why it is not ready; empty if it is."""
    try:
        if address.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(address.removeprefix("unix:"))
        else:
            _without_proxy().open(address, timeout=3).close()
    except urllib.error.HTTPError as error:
        return f"answers {error.code}"
    except (OSError, http.client.HTTPException) as error:
        return f"does not answer ({getattr(error, 'reason', error)})"
    return ""


def _without_proxy() -> urllib.request.OpenerDirector:
    """Asks whether somebody answers, not who: in the namespace there is nobody else."""
    unverified = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), unverified)


def is_node_ready(home: Home, node: str) -> bool:
    path = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
    try:
        return (
            kubectl(home, "get", "node", node, f"--output={path}", "--request-timeout=5s") == "True"
        )
    except ClusterError:
        return False


def wait_for_part(home: Home, ledger: Ledger, part: Part, within_s: float) -> None:
    def ready() -> bool:
        process = ledger.find(part.name)
        if not process or not process.is_alive():
            raise ClusterError(f"{part.name} has ended\n{home.last_lines(part.name)}")
        return not health(part.health)

    wait_until(ready, within_s, f"{part.name} is not ready: {part.health}", home, part.name)


def wait_until(
    ready: Callable[[], bool], within_s: float, otherwise: str, home: Home, log: str
) -> None:
    deadline = time.monotonic() + within_s
    while not ready():
        if time.monotonic() > deadline:
            raise ClusterError(f"{otherwise} after {within_s:.0f} s\n{home.last_lines(log)}")
        time.sleep(0.2)
