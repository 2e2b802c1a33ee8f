"""The cluster's certificate authority, the API server's certificate and the administrator's kubeconfig."""

from __future__ import annotations

import base64
import json
import secrets
import subprocess

from layout import Home
from machine import run
from parts import API, FRONT_PROXY, KUBERNETES_SERVICE, NODE_ADDRESS

VALID_DAYS = 365
RENEW_DAYS = 7


def make_certificates(home: Home) -> None:
    """New ones for each life of a cluster, so that none ever has to be exchanged under a running server."""
    home.pki.mkdir(parents=True, mode=0o700)
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "localhost"]
    addresses = ["127.0.0.1", NODE_ADDRESS, KUBERNETES_SERVICE]
    alternatives = ",".join([f"DNS:{n}" for n in names] + [f"IP:{a}" for a in addresses])
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    new = ["openssl", "req", "-x509", "-days", str(VALID_DAYS), *new_key]
    ca, ca_key = home.pki / "ca.crt", home.pki / "ca.key"
    run(*new, "-keyout", ca_key, "-out", ca, "-subj", "/CN=trainyard test cluster")
    run(
        *new,
        *("-CA", ca, "-CAkey", ca_key),
        *("-keyout", home.pki / "api.key", "-out", home.pki / "api.crt"),
        *("-subj", "/CN=kube-apiserver", "-addext", f"subjectAltName={alternatives}"),
    )
    # With it the API server passes requests on to servers of further APIs, such as Kueue's.
    run(
        *new,
        *("-CA", ca, "-CAkey", ca_key),
        *("-keyout", home.pki / "front-proxy.key", "-out", home.pki / "front-proxy.crt"),
        *("-subj", f"/CN={FRONT_PROXY}"),
    )
    key = home.pki / "service-accounts.key"
    run("openssl", "ecparam", "-genkey", "-name", "prime256v1", "-noout", "-out", key)


def make_administrator(home: Home) -> None:
    """A token that the API server takes for its administrator's, and a kubeconfig that holds it."""
    token = secrets.token_hex(16)
    (home.pki / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    authority = base64.b64encode((home.pki / "ca.crt").read_bytes()).decode()
    home.kubeconfig.touch(mode=0o600)
    home.kubeconfig.write_text(json.dumps(kubeconfig(authority, token), indent=2))


def kubeconfig(authority: str, token: str) -> dict[str, object]:
    name = "trainyard"
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": name, "cluster": {"server": API, "certificate-authority-data": authority}}
        ],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": "admin"}}],
        "current-context": name,
    }


def expire_soon(home: Home) -> bool:
    """Whether the API server's certificate, and so its authority's, ends within a week or is missing."""
    seconds = str(RENEW_DAYS * 24 * 3600)
    check = ["openssl", "x509", "-noout", "-checkend", seconds, "-in", str(home.pki / "api.crt")]
    return subprocess.run(check, capture_output=True).returncode != 0
