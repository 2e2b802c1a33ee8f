"""Who may talk to the pods of runs, and to whom they may talk."""

from __future__ import annotations

from typing import Any

import pytest

from tests.charts.helm_chart import Object, of_kind, pods_of, render
from tests.charts.network_rules import Peer, allows

RUN = {"app.kubernetes.io/part-of": "trainyard"}
HEAD = RUN | {"ray.io/node-type": "head"}
WORKER = RUN | {"ray.io/node-type": "worker"}
OTHER_RUN = Peer(namespace="team-vision", labels=WORKER)
NEIGHBOUR = Peer(namespace="team-vision", labels={"app": "notebook"})
OTHER_TEAM = Peer(namespace="team-speech", labels=WORKER)
OPERATOR = Peer(namespace="kuberay-system", labels={"app.kubernetes.io/name": "kuberay-operator"})
PROMETHEUS = Peer(namespace="monitoring", labels={"app": "prometheus"})
DNS = Peer(namespace="kube-system", labels={"k8s-app": "kube-dns"})
NODE_DNS = Peer(address="169.254.20.10")
NODE = Peer(address="10.0.1.5")
API_SERVER = Peer(address="10.0.0.10")
MINIO = Peer(address="10.20.0.7")
INTERNET = Peer(address="203.0.113.9")
METADATA = Peer(address="169.254.169.254")

S3 = {"path": "s3://models", "endpoint": "http://10.20.0.7:9000", "secretName": "bucket"}
ON_S3 = {"claim": None, "s3": S3}
POLICY = {"enabled": True, "apiServerCidrs": ["10.0.0.10/32"]}


def policies_of(storage: dict[str, Any] | None = None, **values: Any) -> list[Object]:
    security = {"networkPolicy": POLICY | values.pop("policy", {})}
    objects = render({"storage": storage or {}, "security": security} | values)
    return list(of_kind(objects, "NetworkPolicy").values())


@pytest.fixture(scope="module")
def on_claim() -> list[Object]:
    return policies_of()


@pytest.fixture(scope="module")
def on_minio() -> list[Object]:
    return policies_of(ON_S3)


def test_there_is_none_unless_asked_for():
    assert of_kind(render({}), "NetworkPolicy") == {}


def test_it_holds_for_every_pod_of_the_chart(on_claim):
    pods = pods_of(render({"rayCluster": {"enabled": True}, "prePull": {"enabled": True}}))
    assert len(pods) == 9
    selected = on_claim[0]["spec"]["podSelector"]["matchLabels"].items()
    assert all(selected <= pod["metadata"]["labels"].items() for pod in pods.values())


@pytest.mark.parametrize(
    ("peer", "port", "may"),
    [
        (OTHER_RUN, 6379, True),
        (OTHER_RUN, 40123, True),
        (OPERATOR, 8265, True),
        (OPERATOR, 6379, False),
        (PROMETHEUS, 8080, False),
        # A namespace may be called as the operator's and have no operator in it.
        (Peer(namespace="kuberay", labels=OPERATOR.labels), 8265, False),
        *(
            (peer, port, False)
            for peer in (
                NEIGHBOUR,
                OTHER_TEAM,
                PROMETHEUS,
                DNS,
                NODE,
                API_SERVER,
                INTERNET,
                METADATA,
            )
            for port in (22, 6379, 8265, 10001, 40123, 52365)
        ),
    ],
)
def test_who_may_call_a_pod(on_claim, peer, port, may):
    assert allows(on_claim, "ingress", HEAD, peer, port) is may


@pytest.mark.parametrize(
    ("peer", "port", "protocol", "may"),
    [
        (OTHER_RUN, 40123, "TCP", True),
        (OTHER_RUN, 40123, "UDP", True),
        (NEIGHBOUR, 80, "TCP", False),
        (OTHER_TEAM, 6379, "TCP", False),
        (DNS, 53, "UDP", True),
        (DNS, 53, "TCP", True),
        (DNS, 8080, "TCP", False),
        (NODE_DNS, 53, "UDP", True),
        (NODE, 10250, "TCP", False),
        (API_SERVER, 443, "TCP", False),
        (API_SERVER, 6443, "TCP", False),
        (METADATA, 80, "TCP", False),
        (METADATA, 443, "TCP", False),
        (INTERNET, 443, "TCP", False),
        (INTERNET, 53, "TCP", False),
        (OPERATOR, 443, "TCP", False),
        (PROMETHEUS, 9090, "TCP", False),
    ],
)
def test_whom_a_worker_on_a_claim_may_call(on_claim, peer, port, protocol, may):
    assert allows(on_claim, "egress", WORKER, peer, port, protocol) is may


def test_the_head_alone_calls_the_api_server_and_only_where_runs_may_be_elastic(on_claim):
    assert allows(on_claim, "egress", HEAD, API_SERVER, 443)
    assert not allows(on_claim, "egress", HEAD, INTERNET, 443)
    rigid = policies_of(elastic={"enabled": False}, policy={"apiServerCidrs": []})
    assert not allows(rigid, "egress", HEAD, API_SERVER, 443)


@pytest.mark.parametrize(
    ("peer", "port", "may"),
    [(MINIO, 9000, True), (MINIO, 22, False), (METADATA, 80, False), (INTERNET, 443, False)],
)
def test_whom_a_worker_on_s3_may_call(on_minio, peer, port, may):
    assert allows(on_minio, "egress", WORKER, peer, port) is may


def test_the_servers_addresses_narrow_its_port():
    policies = policies_of(ON_S3, policy={"storageCidrs": ["10.20.0.0/24"]})
    assert allows(policies, "egress", WORKER, MINIO, 9000)
    assert not allows(policies, "egress", WORKER, INTERNET, 9000)


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("", 443),
        ("https://s3.example.com", 443),
        ("https://s3.example.com:8443/", 8443),
        ("http://minio", 80),
        ("http://minio.storage:9000", 9000),
    ],
)
def test_the_port_of_the_storage_is_the_endpoints(endpoint, port):
    policies = policies_of({"claim": None, "s3": S3 | {"endpoint": endpoint}})
    open_ports = [p for p in (80, 443, 8443, 9000) if allows(policies, "egress", RUN, MINIO, p)]
    assert open_ports == [port]


def test_without_a_secret_rights_may_be_fetched():
    policies = policies_of({"claim": None, "s3": {"path": "s3://models"}})
    assert allows(policies, "egress", WORKER, METADATA, 80)
    assert allows(policies, "egress", WORKER, INTERNET, 443)
    assert not allows(policies, "egress", WORKER, INTERNET, 80)


def test_prometheus_may_scrape_once_it_is_told_to():
    policies = policies_of(monitoring={"podMonitor": {"enabled": True}})
    assert allows(policies, "ingress", WORKER, PROMETHEUS, 8080)
    assert not allows(policies, "ingress", WORKER, PROMETHEUS, 6379)
    elsewhere = policies_of(monitoring={"namespace": "ops", "podMonitor": {"enabled": True}})
    assert not allows(elsewhere, "ingress", WORKER, PROMETHEUS, 8080)


def test_the_operator_may_live_elsewhere():
    policies = policies_of(operator={"namespace": "default"})
    assert allows(policies, "ingress", HEAD, Peer(namespace="default"), 8265)
    assert not allows(policies, "ingress", HEAD, OPERATOR, 8265)


def test_more_peers_may_be_named():
    rules = {
        "ingress": [{"namespaces": ["team-speech"], "ports": [8265]}],
        "egress": [{"cidrs": ["203.0.113.0/24"], "ports": [443, 8443]}, {"namespaces": ["data"]}],
    }
    policies = policies_of(policy=rules)
    assert allows(policies, "ingress", HEAD, OTHER_TEAM, 8265)
    assert not allows(policies, "ingress", HEAD, OTHER_TEAM, 6379)
    assert allows(policies, "egress", WORKER, INTERNET, 8443)
    assert not allows(policies, "egress", WORKER, INTERNET, 80)
    assert allows(policies, "egress", WORKER, Peer(namespace="data"), 5432)
