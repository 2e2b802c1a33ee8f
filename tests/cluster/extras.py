"""Systems that only some tests need, each in a cluster that is up: Kueue, Prometheus, Flux.

They stay until `down`, as their objects do.
"""

from __future__ import annotations

import base64
import json
import shutil
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import build
import flux
import kueue
import machine
import monitoring
from checks import Object, apply, are_established, kubectl, say, wait_for_part, wait_until
from layout import Home
from machine import inside_namespace
from parts import Part
from processes import Ledger


@dataclass(frozen=True)
class Extra:
    """A system that `up --NAME` adds."""

    text: str
    """What there is then, for `--help`."""
    sets: tuple[str, ...]
    """The sets of `tools/` that it is built of."""
    parts: Callable[[Home], tuple[Part, ...]]
    start: Callable[[Home, Ledger], None]
    """Starts its parts inside the namespace, and returns when each of them is ready."""


def is_running(home: Home, ledger: Ledger, extra: Extra) -> bool:
    """Whether all processes of an extra are there."""
    found = [ledger.find(part.name) for part in extra.parts(home)]
    return all(process is not None and process.is_alive() for process in found)


def add(home: Home, name: str) -> None:
    """Have an extra in the cluster that is up, unless it is there."""
    extra, ledger = EXTRAS[name], Ledger(home.ledger)
    build.build_tools(home, say, extra.sets)
    if is_running(home, ledger, extra):
        return
    with inside_namespace():
        extra.start(home, ledger)
    say(f"{name} is in the cluster")


def _launch(home: Home, ledger: Ledger, part: Part) -> None:
    ledger.start(part.name, part.command, home.log(part.name), home.root)
    wait_for_part(home, ledger, part, 90)


def _apply_kinds(home: Home, folder: Path) -> None:
    kubectl(home, "apply", "--server-side", "--filename", str(folder))
    _wait_for_kinds(home)


def _wait_for_kinds(home: Home) -> None:
    wait_until(lambda: are_established(home), 60, "not all kinds are there", home, "kube-apiserver")


# --- Kueue


def _start_kueue(home: Home, ledger: Ledger) -> None:
    certificates, part = home.kueue / "certificates", kueue.kueue(home)
    for folder in (certificates, home.kueue / "visibility"):
        folder.mkdir(parents=True, exist_ok=True)
    (home.kueue / "kueue.json").write_text(kueue.configuration())
    machine.route_services()
    apply(home, kueue.objects_for_process(_kueue_manifests(home)))
    _wait_for_kinds(home)
    ledger.start(part.name, part.command, home.log(part.name), home.root)
    # It makes the certificate of its webhooks itself; in a pod the kubelet would bring it back.
    wait_until(
        lambda: _has_kueue_certificate(home, certificates),
        60,
        "Kueue has made no certificate",
        home,
        part.name,
    )
    wait_for_part(home, ledger, part, 90)


def _kueue_manifests(home: Home) -> list[Object]:
    """Its objects as the module's kustomization has them, in JSON by kubectl: Python alone reads no YAML."""
    text = kubectl(home, "kustomize", str(home.kueue_manifests / "default"))
    dry = ("--dry-run=client", "--validate=false", "--output=json", "--filename=-")
    printed, decoder, found = kubectl(home, "create", *dry, stdin=text), json.JSONDecoder(), []
    while printed := printed.lstrip():
        manifest, length = decoder.raw_decode(printed)
        found += manifest["items"] if manifest["kind"] == "List" else [manifest]
        printed = printed[length:]
    return found


def _has_kueue_certificate(home: Home, folder: Path) -> bool:
    """Copy the certificate of Kueue's webhooks to where it reads it; False before Kueue has made it."""
    secret = json.loads(
        kubectl(home, "get", "secret", kueue.CERTIFICATE, f"-n={kueue.NAMESPACE}", "--output=json")
    )
    content = secret.get("data") or {}
    for name in ("tls.key", "tls.crt"):
        if name in content:
            (folder / name).write_bytes(base64.b64decode(content[name]))
    return {"tls.key", "tls.crt"} <= content.keys()


# --- Prometheus


def _start_monitoring(home: Home, ledger: Ledger) -> None:
    home.monitoring.mkdir(parents=True, exist_ok=True)
    (home.monitoring / "alertmanager.json").write_text(monitoring.alertmanager_configuration())
    token = (home.pki / "tokens.csv").read_text().partition(",")[0]
    (home.monitoring / "token").write_text(token)
    _apply_kinds(home, home.monitoring_crds)
    _launch(home, ledger, monitoring.operator(home))
    apply(home, monitoring.manifests(home))
    wait_until(
        lambda: mount_rules(home), 60, "no configuration is there", home, "prometheus-operator"
    )
    _launch(home, ledger, monitoring.alertmanager(home))
    _launch(home, ledger, monitoring.prometheus(home))


def mount_rules(home: Home) -> bool:
    """Copy the configuration and the rules that the operator has made to where Prometheus reads them.

    In a pod the kubelet does this. False before the operator has made any.
    """
    namespace, asked = (
        f"--namespace={monitoring.NAMESPACE}",
        ("--ignore-not-found", "--output=json"),
    )
    secret = kubectl(home, "get", "secret", monitoring.SECRET, namespace, *asked)
    config_maps = json.loads(kubectl(home, "get", "configmaps", namespace, "--output=json"))
    files = monitoring.rule_files(config_maps["items"])
    if not secret:
        return False
    rules = home.monitoring / "rules"
    shutil.rmtree(rules, ignore_errors=True)
    for name, text in files.items():
        path = rules / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    text = monitoring.configuration(json.loads(secret), str(rules))
    (home.monitoring / "prometheus.yaml").write_text(text)
    return True


def reload_prometheus(home: Home) -> None:
    """Have Prometheus read what its operator has made of the monitors and rules of the cluster."""
    with inside_namespace():
        mount_rules(home)
        reload = urllib.request.Request(f"{monitoring.PROMETHEUS}/-/reload", method="POST")
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            reload, timeout=30
        ).close()


# --- Flux


def _start_flux(home: Home, ledger: Ledger) -> None:
    _apply_kinds(home, home.flux_crds)
    apply(home, [flux.NAMESPACE_OBJECT])
    _launch(home, ledger, flux.kustomize_controller(home))


EXTRAS = {
    "flux": Extra(
        "Flux's kustomize-controller",
        ("flux",),
        lambda home: (flux.kustomize_controller(home),),
        _start_flux,
    ),
    "kueue": Extra("Kueue", ("kueue",), lambda home: (kueue.kueue(home),), _start_kueue),
    "monitoring": Extra(
        "Prometheus, its operator and Alertmanager",
        ("alertmanager", "prometheus", "prometheus-operator"),
        lambda home: (
            monitoring.operator(home),
            monitoring.alertmanager(home),
            monitoring.prometheus(home),
        ),
        _start_monitoring,
    ),
}
"""By name: what `up --NAME` adds. `up` without it replaces a cluster that has it."""
