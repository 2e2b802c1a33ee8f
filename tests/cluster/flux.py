"""Flux's kustomize-controller as a process of the machine. Text only, no I/O.

Its source-controller, which fetches from Git, cannot be built: a module that it needs cannot be downloaded.
Tests write the status of a GitRepository in its place.
"""

from __future__ import annotations

from layout import Home
from parts import Part

NAMESPACE = "flux-system"
NAMESPACE_OBJECT = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}


def kustomize_controller(home: Home) -> Part:
    """A part that only `up --flux` starts. It applies what lies in Git."""
    command = (
        "env",
        f"RUNTIME_NAMESPACE={NAMESPACE}",
        f"KUBECONFIG={home.kubeconfig}",
        str(home.bin / "kustomize-controller"),
        "--metrics-addr=127.0.0.1:8095",
        "--health-addr=127.0.0.1:9441",
        "--enable-leader-election=false",
    )
    return Part("kustomize-controller", command, "http://127.0.0.1:9441/readyz")
