"""Where everything of the test cluster lies, and the error that every step of it raises."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


class ClusterError(Exception):
    """What went wrong; further lines hold the numbers and the remedy."""


@dataclass(frozen=True)
class Home:
    """The folder that holds all of the cluster: one property for each file or folder in it."""

    root: Path

    def of_node(self, name: str) -> Home:
        """Of a further node: what it has for itself lies there as the first one's lies here."""
        return Home(self.root / name)

    # Made by `build`, kept for good.
    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def crds(self) -> Path:
        """The custom resource definitions of the KubeRay operator that is built."""
        return self.root / "crds"

    @property
    def kwok_stages(self) -> Path:
        """How nodes that do not exist behave."""
        return self.root / "kwok-stages.yaml"

    @property
    def kueue_manifests(self) -> Path:
        """The folder `config` of Kueue's module."""
        return self.root / "kueue-manifests"

    @property
    def monitoring_crds(self) -> Path:
        """The custom resource definitions of the Prometheus operator."""
        return self.root / "monitoring-crds"

    @property
    def flux_crds(self) -> Path:
        """The custom resource definitions of Flux's kustomize-controller and source-controller."""
        return self.root / "flux-crds"

    @property
    def pause_image(self) -> Path:
        return self.root / "pause.tar"

    # Image content: a cache that outlives `down`.
    @property
    def registry(self) -> Path:
        return self.root / "registry"

    @property
    def containerd_root(self) -> Path:
        return self.root / "containerd"

    @property
    def buildah(self) -> Path:
        return self.root / "buildah"

    # Of one life of the cluster, from `up` to `down`.
    @property
    def live(self) -> Path:
        return self.root / "live"

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    @property
    def ledger(self) -> Path:
        """Who was started: see `processes.Ledger`."""
        return self.root / "processes.json"

    @property
    def config(self) -> Path:
        return self.live / "config"

    @property
    def pki(self) -> Path:
        return self.live / "pki"

    @property
    def etcd(self) -> Path:
        return self.live / "etcd"

    @property
    def kueue(self) -> Path:
        """Where Kueue runs: its configuration, and the certificates of its webhooks."""
        return self.live / "kueue"

    @property
    def monitoring(self) -> Path:
        """Where Prometheus and Alertmanager run: their configuration, rules and data."""
        return self.live / "monitoring"

    @property
    def kwok_logs(self) -> Path:
        """Where pods on nodes that do not exist have their logs."""
        return self.config / "kwok-logs.json"

    @property
    def made_up_log(self) -> Path:
        """What all of them say: each line as `<time> stdout F <text>`."""
        return self.live / "made-up.log"

    @property
    def kubelet(self) -> Path:
        return self.live / "kubelet"

    @property
    def cni(self) -> Path:
        return self.live / "cni"

    @property
    def containerd_state(self) -> Path:
        return self.live / "containerd"

    @property
    def containerd_socket(self) -> Path:
        return self.live / "containerd.sock"

    # Kept after `down` for whoever wants to know what happened; emptied by the next `up`.
    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def volumes(self) -> Path:
        return self.root / "volumes"

    def log(self, part: str) -> Path:
        return self.logs / f"{part}.log"

    def last_lines(self, part: str, count: int = 15) -> str:
        """The end of a part's log, indented, for an error message."""
        try:
            lines = self.log(part).read_text(errors="replace").splitlines()[-count:]
        except FileNotFoundError:
            lines = ["(no log)"]
        return "\n".join(
            [f"       last lines of {self.log(part)}:", *(f"         {line}" for line in lines)]
        )


def home_of(environment: dict[str, str] | os._Environ[str]) -> Home:
    folder = environment.get("TRAINYARD_CLUSTER_HOME")
    return Home(Path(folder).absolute() if folder else Path.home() / ".cache/trainyard/cluster")
