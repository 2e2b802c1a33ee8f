"""Kueue as a process of the machine: command line, configuration and manifests. Text only, no I/O."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from layout import Home
from objects import endpoints
from parts import Part

PART = "kueue"
NAMESPACE = "kueue-system"
CERTIFICATE = "kueue-webhook-server-cert"
"""The Secret into which Kueue writes the certificate of its webhooks. In a pod the kubelet mounts it."""
PORTS = {"kueue-webhook-service": 9443, "kueue-visibility-server": 8092}
"""Its services, and the ports on which the process listens for them."""
WEBHOOKS_OF = {
    "clusterqueues", "cohorts", "localqueues", "rayclusters", "rayjobs", "resourceflavors", "workloads"
}  # fmt: skip
"""The kinds whose webhooks are kept: those of others would refuse all pods and jobs while it is away."""

Object = dict[str, Any]


def kueue(home: Home) -> Part:
    """A part that only `up --kueue` starts. It runs in its own folder, where its certificates lie."""
    command = (
        "env",
        f"--chdir={home.kueue}",
        str(home.bin / PART),
        "--config=kueue.json",
        f"--kubeconfig={home.kubeconfig}",
        f"--visibility-server-port={PORTS['kueue-visibility-server']}",
        "--zap-log-level=2",
    )
    return Part(PART, command, "http://127.0.0.1:8091/readyz")


def configuration() -> str:
    """Return its configuration. JSON is YAML."""
    content = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": "127.0.0.1:8091"},
        "metrics": {"bindAddress": "127.0.0.1:8093", "enableClusterQueueResources": True},
        "webhook": {"port": PORTS["kueue-webhook-service"], "certDir": "certificates"},
        "leaderElection": {"leaderElect": False},
        "integrations": {"frameworks": ["ray.io/rayjob", "ray.io/raycluster"]},
        "featureGates": {"ElasticJobsViaWorkloadSlices": True},
    }
    return json.dumps(content, indent=2) + "\n"


def objects_for_process(manifests: Iterable[Object]) -> list[Object]:
    """Return Kueue's objects, changed so that a process of the machine takes the place of its pod."""
    changed: list[Object] = []
    for manifest in manifests:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind in ("Deployment", "ConfigMap") or (kind == "Service" and name not in PORTS):
            continue
        if kind == "Service":
            changed += _service(manifest)
            continue
        if kind.endswith("WebhookConfiguration"):
            manifest = manifest | {"webhooks": [w for w in manifest["webhooks"] if _is_kept(w)]}
        changed.append(manifest)
    return changed


def _service(manifest: Object) -> tuple[Object, Object]:
    """Return a service without a selector, and the endpoint that it leads to."""
    name = manifest["metadata"]["name"]
    port = PORTS[name]
    spec = {key: value for key, value in manifest["spec"].items() if key != "selector"}
    named = [{**each, "targetPort": port} for each in spec["ports"]]
    endpoint = endpoints(NAMESPACE, name, {each.get("name", ""): port for each in named}, {})
    return manifest | {"spec": spec | {"ports": named}}, endpoint


def _is_kept(webhook: Object) -> bool:
    resources = {
        resource.partition("/")[0] for rule in webhook["rules"] for resource in rule["resources"]
    }
    return resources <= WEBHOOKS_OF
