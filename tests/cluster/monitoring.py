"""Prometheus, its operator and Alertmanager as processes of the machine. Text only, no I/O.

The operator writes configuration and rules of Prometheus into a Secret and ConfigMaps. It makes them of
PodMonitors, ServiceMonitors and PrometheusRules. In a pod, the kubelet mounts them.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64decode
from collections.abc import Iterable
from typing import Any

from layout import Home
from objects import endpoints
from parts import API, NODE_ADDRESS, OPERATOR_METRICS_PORT, Part

NAMESPACE = "monitoring"
NAME = "test"
"""The name of the Prometheus object."""
SECRET = f"prometheus-{NAME}"
"""The Secret with the configuration that the operator makes."""
LABELS = {"release": "prometheus"}
"""The labels by which this Prometheus selects PodMonitors and PrometheusRules."""
RULES_IN_POD = "/etc/prometheus/rules"

PROMETHEUS = "http://127.0.0.1:9090"
ALERTMANAGER_PORT = 9093
WEBHOOK = "http://127.0.0.1:9099/"
"""The receiver of all alerts. Nobody listens there but a test that wants them."""

Object = dict[str, Any]


def operator(home: Home) -> Part:
    """The operator, which watches all namespaces."""
    command = (
        "env",
        f"KUBECONFIG={home.kubeconfig}",
        str(home.bin / "operator"),
        "--web.listen-address=127.0.0.1:8097",
        "--kubelet-endpoints=false",
    )
    return Part("prometheus-operator", command, "http://127.0.0.1:8097/healthz")


def prometheus(home: Home) -> Part:
    folder = home.monitoring
    command = (
        str(home.bin / "prometheus"),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={PROMETHEUS.removeprefix('http://')}",
        "--web.enable-lifecycle",
    )
    return Part("prometheus", command, f"{PROMETHEUS}/-/ready")


def alertmanager(home: Home) -> Part:
    folder = home.monitoring
    command = (
        str(home.bin / "alertmanager"),
        f"--config.file={folder / 'alertmanager.json'}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address={NODE_ADDRESS}:{ALERTMANAGER_PORT}",
        "--cluster.listen-address=",  # one alone
    )
    ready = f"http://{NODE_ADDRESS}:{ALERTMANAGER_PORT}/-/ready"
    return Part("alertmanager", command, ready)


def alertmanager_configuration() -> str:
    """Return a configuration that sends each alert to one webhook at once. JSON is YAML."""
    route = {
        "receiver": "webhook",
        "group_by": ["..."],
        "group_wait": "0s",
        "group_interval": "1s",
        "repeat_interval": "1h",
    }
    webhook = {"name": "webhook", "webhook_configs": [{"url": WEBHOOK}]}
    return json.dumps({"route": route, "receivers": [webhook]}, indent=2) + "\n"


def manifests(home: Home) -> list[Object]:
    """Return the Prometheus object, and the services of Alertmanager and of the KubeRay operator."""
    namespaces = (NAMESPACE, "kuberay-system")
    return [
        *({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": n}} for n in namespaces),
        _prometheus(home),
        *_service(NAMESPACE, "alertmanager", ALERTMANAGER_PORT),
        *_service("kuberay-system", "kuberay-operator", OPERATOR_METRICS_PORT),
        _operator_monitor(),
    ]


def _prometheus(home: Home) -> Object:
    """It has no pods: a process of the machine takes the place of one."""
    everywhere: Object = {}
    ours = {"matchLabels": LABELS}
    spec = {
        "replicas": 0,
        "version": "v3.5.0",
        "evaluationInterval": "5s",
        "scrapeInterval": "5s",
        "serviceDiscoveryRole": "EndpointSlice",
        "podMonitorSelector": ours,
        "podMonitorNamespaceSelector": everywhere,
        "ruleSelector": ours,
        "ruleNamespaceSelector": everywhere,
        "serviceMonitorSelector": ours,
        "serviceMonitorNamespaceSelector": everywhere,
        # In a pod, these two labels come from the name of the pod.
        "replicaExternalLabelName": "",
        "prometheusExternalLabelName": "",
        "apiserverConfig": {
            "host": API,
            "bearerTokenFile": str(home.monitoring / "token"),
            "tlsConfig": {"caFile": str(home.pki / "ca.crt")},
        },
        "alerting": {
            "alertmanagers": [{"namespace": NAMESPACE, "name": "alertmanager", "port": "http"}]
        },
    }
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "Prometheus",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": spec,
    }


def _operator_monitor() -> Object:
    """A ServiceMonitor of the KubeRay operator, as its Helm chart has it."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": {
            "name": "kuberay-operator",
            "namespace": "kuberay-system",
            "labels": LABELS,
        },
        "spec": {
            "endpoints": [{"port": "http", "path": "/metrics", "honorLabels": True}],
            "selector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
        },
    }


def _service(namespace: str, name: str, port: int) -> tuple[Object, Object]:
    """Return a service without a selector that leads to a process of the machine."""
    labels = {"app.kubernetes.io/name": name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"ports": [{"name": "http", "port": port}]},
    }
    return service, endpoints(namespace, name, {"http": port}, labels)


def configuration(secret: Object, rules_folder: str) -> str:
    """Return the configuration out of the operator's Secret, for a Prometheus that is no pod.

    The folder of rules is one of this machine. In a pod, the config reloader puts in the number of the shard.
    """
    text = gzip.decompress(b64decode(secret["data"]["prometheus.yaml.gz"])).decode()
    return text.replace(RULES_IN_POD, rules_folder).replace("$(SHARD)", "0")


def rule_files(config_maps: Iterable[Object]) -> dict[str, str]:
    """Return the files of rules out of the operator's ConfigMaps: by their path in the folder of rules."""
    return {
        f"{each['metadata']['name']}/{name}": text
        for each in config_maps
        if each["metadata"]["name"].startswith(f"prometheus-{NAME}-rulefiles-")
        for name, text in (each.get("data") or {}).items()
    }
