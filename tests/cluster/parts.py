"""What runs in the cluster: each part's command line, configuration and health check. Text only, no I/O."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from layout import Home

NODE = "node-1"

# All addresses are from 198.18.0.0/15, which is reserved for tests. The API server refuses to
# advertise a loopback address, so the node has one of its own, on a bridge.
NODE_ADDRESS = "198.18.0.1"
NODE_NETWORK = "198.18.0.1/17"
POD_NETWORK = "198.18.128.0/17"
SERVICE_NETWORK = "198.19.0.0/16"
KUBERNETES_SERVICE = "198.19.0.1"

# Clients use the loopback address: one that runs outside the namespace by mistake then finds
# nothing, while 198.18.0.1 may be somebody else's machine out there.
API = "https://127.0.0.1:6443"
FRONT_PROXY = "front-proxy-client"
"""The API server's own name towards servers of further APIs."""
REGISTRY = "127.0.0.1:5000"
OPERATOR_METRICS_PORT = 8081
KWOK_PORT = 10247
MADE_UP = "trainyard.io/made-up"
"""Label and taint of nodes that do not exist."""
MADE_UP_NETWORK = "198.18.64.0/18"
"""Addresses of their pods: all are this machine's own, so whoever listens here answers for each of them."""
PAUSE_IMAGE = "localhost/pause:1"

CGROUP = "trainyard"
"""The cgroup of all pods, below which nothing is but them."""


@dataclass(frozen=True)
class AddedNode:
    """A further node on the same machine, which only `nodes` starts: what it has for itself."""

    number: int
    pod_network: str
    kubelet_port: int
    health_port: int

    @property
    def name(self) -> str:
        return f"node-{self.number}"

    @property
    def address(self) -> str:
        return f"198.18.0.{self.number}"

    @property
    def network(self) -> str:
        return f"{self.address}/{NODE_NETWORK.partition('/')[2]}"

    @property
    def cgroup(self) -> str:
        return f"{CGROUP}/{self.name}"


ADDED_NODES = (
    AddedNode(2, "198.18.32.0/19", kubelet_port=10260, health_port=10258),
    AddedNode(3, "198.18.16.0/20", kubelet_port=10262, health_port=10261),
)


@dataclass(frozen=True)
class Part:
    """One process of the cluster."""

    name: str
    command: tuple[str, ...]
    health: str
    """Answers when the part is ready: an http(s) address inside the namespace, or unix:PATH."""


def parts(home: Home) -> tuple[Part, ...]:
    """All parts, in the order in which they start."""
    config, pki, kubeconfig = home.config, home.pki, f"--kubeconfig={home.kubeconfig}"

    def part(name: str, health: str, *arguments: str, program: str = "") -> Part:
        built = home.bin / (program or name)
        return Part(name, (program if program in FROM_DEBIAN else str(built), *arguments), health)

    return (
        part(
            "etcd",
            "http://127.0.0.1:2379/health",
            f"--data-dir={home.etcd}",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--unsafe-no-fsync",  # the data does not outlive the cluster
            program="etcd",
        ),
        part(
            "containerd",
            f"unix:{home.containerd_socket}",
            f"--config={config / 'containerd.toml'}",
            program="containerd",
        ),
        part(
            "registry",
            f"http://{REGISTRY}/v2/",
            "serve",
            str(config / "registry.json"),
            program="docker-registry",
        ),
        part(
            "kube-apiserver",
            f"{API}/readyz",
            "--etcd-servers=http://127.0.0.1:2379",
            f"--advertise-address={NODE_ADDRESS}",
            "--secure-port=6443",
            f"--tls-cert-file={pki / 'api.crt'}",
            f"--tls-private-key-file={pki / 'api.key'}",
            f"--client-ca-file={pki / 'ca.crt'}",
            f"--token-auth-file={pki / 'tokens.csv'}",
            f"--service-account-key-file={pki / 'service-accounts.key'}",
            f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-cluster-ip-range={SERVICE_NETWORK}",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            # A list as a watch needs etcd 3.5. With Debian's 3.4 such watches end with an error, again and
            # again, so that a client (kwok) works with old objects.
            "--feature-gates=WatchList=false",
            "--kubelet-preferred-address-types=InternalIP",
            f"--requestheader-client-ca-file={pki / 'ca.crt'}",
            f"--requestheader-allowed-names={FRONT_PROXY}",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={pki / 'front-proxy.crt'}",
            f"--proxy-client-key-file={pki / 'front-proxy.key'}",
        ),
        part(
            "kube-controller-manager",
            "https://127.0.0.1:10257/healthz",
            kubeconfig,
            f"--service-account-private-key-file={pki / 'service-accounts.key'}",
            f"--root-ca-file={pki / 'ca.crt'}",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
        ),
        part(
            "kube-scheduler",
            "https://127.0.0.1:10259/healthz",
            kubeconfig,
            "--leader-elect=false",
        ),
        part(
            "kube-proxy",
            "http://127.0.0.1:10256/healthz",
            kubeconfig,
            f"--hostname-override={NODE}",
            f"--cluster-cidr={POD_NETWORK}",
            "--proxy-mode=iptables",
            # Connection tracking is the machine's, not ours to tune.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0s",
            "--conntrack-tcp-timeout-close-wait=0s",
        ),
        part("coredns", "http://127.0.0.1:8181/ready", f"-conf={config / 'Corefile'}"),
        part(
            "kubelet",
            "http://127.0.0.1:10248/healthz",
            f"--config={config / 'kubelet.json'}",
            kubeconfig,
            f"--root-dir={home.kubelet}",
            f"--hostname-override={NODE}",
            f"--node-ip={NODE_ADDRESS}",
        ),
        _with_names_of_pods(
            home,
            part(
                "ray-operator",
                "http://127.0.0.1:8082/readyz",
                f"-kubeconfig={home.kubeconfig}",
                "-enable-leader-election=false",
                f"-metrics-addr=:{OPERATOR_METRICS_PORT}",
                "-enable-metrics=true",
            ),
        ),
    )


def _with_names_of_pods(home: Home, part: Part) -> Part:
    """It resolves names as pods do, and so reaches the services of Ray heads as it does in a pod."""
    names = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'
    inside = ("unshare", "--mount", "sh", "-c", names, str(home.config / "resolv.conf"))
    return replace(part, command=(*inside, *part.command))


def kwok(home: Home) -> Part:
    """Plays the kubelet of nodes that do not exist: a part that only `kwok N` starts.

    The API server asks it for the logs of their pods.
    """
    command = (
        str(home.bin / "kwok"),
        f"--kubeconfig={home.kubeconfig}",
        f"--config={home.kwok_stages}",
        f"--config={home.kwok_logs}",
        f"--manage-nodes-with-label-selector={MADE_UP}=true",
        f"--cidr={MADE_UP_NETWORK}",
        f"--node-ip={NODE_ADDRESS}",
        f"--node-port={KWOK_PORT}",
        f"--server-address=0.0.0.0:{KWOK_PORT}",
        f"--tls-cert-file={home.pki / 'api.crt'}",
        f"--tls-private-key-file={home.pki / 'api.key'}",
        # It renews a lease after a quarter of this, and a node without news for 50 s is not ready.
        "--node-lease-duration-seconds=100",
    )
    return Part("kwok", command, f"http://127.0.0.1:{KWOK_PORT}/healthz")


def parts_of_node(home: Home, node: AddedNode) -> tuple[Part, Part]:
    """Containerd and kubelet of a further node."""
    own = home.of_node(node.name)
    kubelet = (
        str(home.bin / "kubelet"),
        f"--config={own.config / 'kubelet.json'}",
        f"--kubeconfig={home.kubeconfig}",
        f"--root-dir={own.kubelet}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
    )
    config = f"--config={own.config / 'containerd.toml'}"
    health = f"http://127.0.0.1:{node.health_port}/healthz"
    return (
        Part(f"containerd-{node.number}", ("containerd", config), f"unix:{own.containerd_socket}"),
        Part(f"kubelet-{node.number}", kubelet, health),
    )


def files_of_node(home: Home, node: AddedNode) -> dict[Path, str]:
    """The configuration of a further node: another's ports, addresses, folders and cgroup."""
    own = home.of_node(node.name)
    kubelet = _kubelet(home) | {
        "cgroupRoot": f"/{node.cgroup}",
        "containerRuntimeEndpoint": f"unix://{own.containerd_socket}",
        "port": node.kubelet_port,
        "healthzPort": node.health_port,
        # A kubelet removes the logs of pods that it does not know.
        "podLogsDir": str(own.live / "pod-logs"),
    }
    network = _pod_network(own, f"cni{node.number - 1}", node.pod_network)
    return {
        own.config / "containerd.toml": _containerd(own),
        own.config / "cni/10-bridge.conflist": _json(network),
        own.config / "kubelet.json": _json(kubelet),
    }


def kwok_logs(home: Home) -> str:
    """All containers of made up pods say what lies in one file, in the format of a container runtime."""
    return _json(
        {
            "apiVersion": "kwok.x-k8s.io/v1alpha1",
            "kind": "ClusterLogs",
            "metadata": {"name": "all"},
            "spec": {"logs": [{"logsFile": str(home.made_up_log)}]},
        }
    )


FROM_DEBIAN = ("etcd", "containerd", "docker-registry")


def config_files(home: Home) -> dict[Path, str]:
    """The configuration of the parts, without anything secret. JSON is YAML, so most of it is JSON."""
    return {
        home.config / "containerd.toml": _containerd(home),
        home.config / "cni/10-bridge.conflist": _json(_pod_network(home)),
        home.config / "kubelet.json": _json(_kubelet(home)),
        home.config / "registry.json": _json(
            {
                "version": "0.1",
                "storage": {"filesystem": {"rootdirectory": str(home.registry)}},
                "http": {"addr": REGISTRY},
            }
        ),
        home.config / "Corefile": _coredns(home),
        home.config / "resolv.conf": f"nameserver {NODE_ADDRESS}\n",
    }


def fingerprint(home: Home, built: str) -> str:
    """Tells whether a running cluster is what `up` would start now. `built` stands for the programs."""
    files = {str(path): text for path, text in config_files(home).items()}
    commands = [[part.name, *part.command] for part in parts(home)]
    return hashlib.sha256(_json([built, commands, files]).encode()).hexdigest()


def _containerd(home: Home) -> str:
    return f"""\
version = 2
root = "{home.containerd_root}"
state = "{home.containerd_state}"

[grpc]
  address = "{home.containerd_socket}"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # Without CAP_SYS_RESOURCE nobody may lower an OOM score, and no pod would start.
  restrict_oom_score_adj = true
  # Pods' network namespaces are mounts; below our own folder they are ours to remove.
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{home.config / "cni"}"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    # Once unpacked, an image of 6 GB need not lie there packed, too.
    discard_unpacked_layers = true
"""


def _pod_network(home: Home, name: str = "cni0", network: str = POD_NETWORK) -> dict[str, object]:
    bridge = {
        "type": "bridge",
        "bridge": name,
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": network}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": str(home.cni),
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "trainyard", "plugins": [bridge, ports]}


def _kubelet(home: Home) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "cgroupRoot": f"/{CGROUP}",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        # Only the cluster itself can reach this kubelet.
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "clusterDNS": [NODE_ADDRESS],
        "clusterDomain": "cluster.local",
        "resolvConf": str(home.config / "resolv.conf"),
        "containerRuntimeEndpoint": f"unix://{home.containerd_socket}",
        "failSwapOn": False,
        "maxPods": 60,
        # `up` prunes images; the kubelet would also remove the pause image, which nothing can pull.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%"},
    }


def _coredns(home: Home) -> str:
    return f""".:53 {{
  bind {NODE_ADDRESS}
  errors
  ready 127.0.0.1:8181
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {home.kubeconfig}
    pods insecure
  }}
  cache 5
}}
"""


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
