#!/usr/bin/env python3
"""A real Kubernetes with the KubeRay operator on one Linux machine, without Docker.

Everything runs in one network namespace that has no way out. README.md beside this file tells more.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import build
import extras
import machine
import objects
from certificates import expire_soon, make_administrator, make_certificates
from checks import (
    are_established,
    health,
    is_node_ready,
    kubectl,
    say,
    wait_for_part,
    wait_until,
)
from images import prune_containerd, prune_registry
from layout import ClusterError, Home, home_of
from machine import inside_namespace, run
from parts import (
    ADDED_NODES,
    MADE_UP,
    MADE_UP_NETWORK,
    NODE,
    AddedNode,
    Part,
    config_files,
    files_of_node,
    fingerprint,
    kwok,
    kwok_logs,
    parts,
    parts_of_node,
)
from processes import Ledger, end_all, marked

# --- up


def up(home: Home, wanted: Sequence[str]) -> None:
    """Build what is missing, then reuse the cluster that is there or start one, with these extras."""
    build.build_all(home, say)
    _refuse_another_home(home)
    if not leftovers(home):
        start(home)
    elif wrong := problems(home, wanted):
        say("the cluster that is there cannot be used; starting anew")
        for problem in wrong:
            say(f"  {problem}")
        take_down(home)
        start(home)
    else:
        renew_storage(home)
        say("the cluster is up already")
    for name in wanted:
        extras.add(home, name)


def start(home: Home) -> None:
    """Start all parts, and return when each of them is ready."""
    began = time.monotonic()
    ledger = Ledger(home.ledger)
    ledger.begin(fingerprint(home, build.built(home)))
    write_files(home)
    machine.make_namespace()
    machine.make_cgroup()
    with inside_namespace():
        machine.set_up_network()
        prune_registry(home)
        every = {part.name: part for part in parts(home)}

        def launch(*names: str) -> None:
            for name in names:
                ledger.start(name, every[name].command, home.log(name), home.root)

        def await_ready(*names: str, within_s: float) -> None:
            for name in names:
                wait_for_part(home, ledger, every[name], within_s)

        launch("etcd", "containerd", "registry", "kube-apiserver")
        await_ready("containerd", within_s=30)
        load_pause_image(home, home)
        prune_containerd(home, home)
        await_ready("etcd", "kube-apiserver", within_s=90)
        launch("kube-controller-manager", "kube-scheduler", "kube-proxy", "coredns", "kubelet")
        apply_crds(home)
        apply_storage(home)
        launch("ray-operator")
        await_ready(*every, within_s=90)
        wait_until(
            lambda: is_node_ready(home, NODE), 60, f"node {NODE} is not Ready", home, "kubelet"
        )
    say(f"up after {time.monotonic() - began:.0f} s; state, logs and kubeconfig are in {home.root}")


def write_files(home: Home) -> None:
    """Folders, certificates and configuration of a new life. Logs and volumes of the last one end here."""
    for folder in (home.live, home.logs, home.volumes):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in (
        home.live,
        home.logs,
        home.config,
        home.containerd_root,
        *objects.volume_folders(home),
    ):
        folder.mkdir(parents=True, exist_ok=True)
    for folder in objects.volume_folders(home):
        folder.chmod(0o777)  # pods run as users whom this machine does not know
    make_certificates(home)
    make_administrator(home)
    for path, text in config_files(home).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def load_pause_image(home: Home, node: Home) -> None:
    run("ctr", *_ctr(node), "images", "import", home.pause_image)


def apply_crds(home: Home) -> None:
    """The operator's definitions: on the server's side, since they are too big for kubectl's annotation."""
    kubectl(home, "apply", "--server-side", "--filename", str(home.crds))
    wait_until(
        lambda: are_established(home), 30, "KubeRay's kinds are not there", home, "kube-apiserver"
    )


def apply_storage(home: Home) -> None:
    kubectl(home, "apply", "--filename", "-", stdin=json.dumps(objects.storage(home)))


def renew_storage(home: Home) -> None:
    """Empty the volumes whose claims are gone, so that the next claim finds them available."""
    with inside_namespace():
        apply_storage(home)
        volumes = json.loads(kubectl(home, "get", "persistentvolumes", "--output=json"))["items"]
        for name in objects.released(volumes):
            for content in (home.volumes / name).iterdir():
                shutil.rmtree(content) if content.is_dir() else content.unlink()
            kubectl(
                home, "patch", "persistentvolume", name, "--patch", '{"spec": {"claimRef": null}}'
            )


# --- is it up?


def leftovers(home: Home) -> bool:
    return home.ledger.exists() or machine.NAMESPACE.exists() or home.root in marked()


def problems(home: Home, wanted: Sequence[str]) -> list[str]:
    """Why the cluster cannot be used as it is; empty if it can."""
    if not machine.NAMESPACE.exists() or not home.ledger.exists():
        return ["it is only half there"]
    ledger = Ledger(home.ledger)
    for name, extra in extras.EXTRAS.items():
        if name not in wanted and any(ledger.find(part.name) for part in extra.parts(home)):
            return [f"{name} is in it"]
    if ledger.fingerprint != fingerprint(home, build.built(home)):
        return ["its programs or settings are others than those of today"]
    wrong = [f"{part.name}: {state}" for part, state in states(home, ledger) if state != "ready"]
    if expire_soon(home):
        wrong.append("its certificates end within a week")
    if not wrong:
        with inside_namespace():
            wrong = [] if is_node_ready(home, NODE) else [f"node {NODE} is not Ready"]
    return wrong


def states(home: Home, ledger: Ledger) -> list[tuple[Part, str]]:
    """How each part stands: ready, not started, gone, or what its health check says."""

    def state(part: Part) -> str:
        process = ledger.find(part.name)
        if not process:
            return "not started"
        return (
            (health(part.health) or "ready")
            if process.is_alive()
            else f"gone (was process {process.pid})"
        )

    if not machine.NAMESPACE.exists():
        return [(part, "not started") for part in parts(home)]
    with inside_namespace():
        return [(part, state(part)) for part in parts(home)]


# --- down


def down(home: Home, purge: bool) -> None:
    _refuse_another_home(home)
    if leftovers(home):
        take_down(home)
        say("down: no process, mount or network of it is left")
    else:
        say("nothing is up")
    if purge:
        machine.unmount_below(home.root)
        nodes = [each.containerd_root for each in homes_of_nodes(home)]
        for folder in (home.registry, *nodes, home.buildah, home.volumes, home.logs):
            shutil.rmtree(folder, ignore_errors=True)
        say("all image content is deleted; the servers that were built are kept")


def take_down(home: Home) -> None:
    """End what `up` started, however far it came, and remove what it left in the kernel.

    The order matters: first those who would start things again, then the pods, then the rest.
    """
    ledger = Ledger(home.ledger)
    kubelets = [parts_of_node(home, node)[1].name for node in ADDED_NODES]
    ledger.stop(["ray-operator", "kubelet", *kubelets])
    machine.end_cgroup()
    for each in homes_of_nodes(home):
        remove_containers(each)
    names = [process.name for process in ledger.processes]
    ledger.stop(name for name in names if name != "etcd")
    ledger.stop(["etcd"])
    # The shims of a containerd that was killed, and whatever a half finished `up` did not write down.
    end_all(marked().get(home.root, []), patience_s=2)
    lives = [each.live for each in homes_of_nodes(home)]
    for live in lives:
        machine.unmount_below(live)
    machine.delete_namespace()
    for live in lives:
        shutil.rmtree(live, ignore_errors=True)
    home.kubeconfig.unlink(missing_ok=True)
    ledger.remove()


def homes_of_nodes(home: Home) -> list[Home]:
    """Where what each node has for itself lies, from the first one on."""
    return [home, *(home.of_node(node.name) for node in ADDED_NODES)]


def remove_containers(home: Home) -> None:
    """Forget all containers, which also ends their shims. A dead containerd is no obstacle."""
    if health(f"unix:{home.containerd_socket}"):
        return
    for kind in ("tasks", "containers"):
        for name in run("ctr", *_ctr(home), kind, "list", "--quiet").split():
            # One that goes by itself meanwhile is as good.
            subprocess.run(["ctr", *_ctr(home), kind, "remove", name], capture_output=True)


# --- status and GPUs


def status(home: Home) -> bool:
    """Print a table of the parts; tells whether all is well."""
    ledger = Ledger(home.ledger)
    rows = [(part.name, state, ledger.find(part.name)) for part, state in states(home, ledger)]
    for name, state, process in rows:
        print(f"{name:<24} {process.pid if process else '-':>8}  {state}")
    if any(state != "ready" for _, state, _ in rows):
        print(f"{NODE:<24} {'':>8}  unknown")
        return False
    with inside_namespace():
        node = is_node_ready(home, NODE)
    print(f"{NODE:<24} {'':>8}  {'ready' if node else 'not ready'}")
    return node


def set_gpus(home: Home, count: int) -> None:
    _require_up(home)
    with inside_namespace():
        patch = json.dumps(objects.gpu_patch(count))
        kubectl(
            home, "patch", "node", NODE, "--subresource=status", "--type=merge", "--patch", patch
        )
    say(f"node {NODE} claims to have {count} GPUs")


def set_made_up_nodes(home: Home, count: int) -> None:
    """Have so many nodes that do not exist, and the one who plays them; none ends that one."""
    _require_up(home)
    if count:
        build.build_tools(home, say, ["kwok"])
    ledger, part = Ledger(home.ledger), kwok(home)
    with inside_namespace():
        is_there = (process := ledger.find(part.name)) is not None and process.is_alive()
        if count and not is_there:
            home.kwok_logs.write_text(kwok_logs(home))
            home.made_up_log.touch()
            machine.own_addresses(MADE_UP_NETWORK)
            ledger.start(part.name, part.command, home.log(part.name), home.root)
        if count:
            wait_for_part(home, ledger, part, 60)
        listed = kubectl(home, "get", "nodes", f"--selector={MADE_UP}", "--output=name").split()
        there = {int(name.rpartition("-")[2]) for name in listed}
        wanted = set(range(count))
        if missing := objects.made_up_nodes(wanted - there):
            kubectl(home, "create", "--filename", "-", stdin=json.dumps(missing))
        if surplus := [f"made-up-{number}" for number in there - wanted]:
            kubectl(home, "delete", "node", "--wait=false", *surplus)
        if not count and is_there:
            ledger.stop([part.name])
    say(f"{count} nodes are made up")


def set_nodes(home: Home, count: int) -> None:
    """Have so many real nodes. Those that were lost are there again."""
    _require_up(home)
    for node in ADDED_NODES:
        if node.number <= count:
            add_node(home, node)
            continue
        lose_node(home, node)
        with inside_namespace():
            kubectl(home, "delete", "node", node.name, "--ignore-not-found")
    say(f"real nodes: {count}")


def add_node(home: Home, node: AddedNode) -> None:
    """Start a further node, unless it is there."""
    runtime, kubelet = parts_of_node(home, node)
    ledger, own = Ledger(home.ledger), home.of_node(node.name)
    if (process := ledger.find(kubelet.name)) is None or not process.is_alive():
        lose_node(home, node)
        for path, text in files_of_node(home, node).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        own.containerd_root.mkdir(parents=True, exist_ok=True)
        machine.make_cgroup(node.cgroup)
        with inside_namespace():
            machine.end_silence(node.pod_network)
            machine.add_address(node.network)
            ledger.start(runtime.name, runtime.command, home.log(runtime.name), home.root)
            wait_for_part(home, ledger, runtime, 30)
            load_pause_image(home, own)
            prune_containerd(home, own)
            ledger.start(kubelet.name, kubelet.command, home.log(kubelet.name), home.root)
            wait_for_part(home, ledger, kubelet, 60)
    with inside_namespace():
        not_ready = f"node {node.name} is not Ready"
        wait_until(lambda: is_node_ready(home, node.name), 60, not_ready, home, kubelet.name)


def lose_node(home: Home, node: AddedNode) -> None:
    """It goes as a machine does whose power fails: no connection is closed, and its Node stays behind."""
    runtime, kubelet = parts_of_node(home, node)
    ledger, own = Ledger(home.ledger), home.of_node(node.name)
    with inside_namespace():
        machine.silence(node.pod_network)
    ledger.stop([kubelet.name], patience_s=0)
    machine.end_cgroup(node.cgroup)
    remove_containers(own)
    ledger.stop([runtime.name])
    machine.unmount_below(own.live)
    shutil.rmtree(own.live, ignore_errors=True)


def restart(home: Home, name: str) -> None:
    """End one part and start it again, as an upgrade or a crash would; what it serves is away meanwhile."""
    stop_part(home, name)
    start_part(home, name)


def stop_part(home: Home, name: str) -> None:
    """End one part; its pods, its data and its place among the parts stay."""
    Ledger(home.ledger).stop([_part(home, name).name])
    say(f"{name} is away")


def start_part(home: Home, name: str) -> None:
    """Start a part that was stopped, or crashed."""
    part, ledger = _part(home, name), Ledger(home.ledger)
    process = ledger.find(name)
    with inside_namespace():
        if process is None or not process.is_alive():
            ledger.start(name, part.command, home.log(name), home.root)
        wait_for_part(home, ledger, part, 90)
    say(f"{name} is back")


def _part(home: Home, name: str) -> Part:
    added = [part for extra in extras.EXTRAS.values() for part in extra.parts(home)]
    nodes = [part for node in ADDED_NODES for part in parts_of_node(home, node)]
    every = {part.name: part for part in (*parts(home), *nodes, *added)}
    if name not in every:
        raise ClusterError(f"there is no part {name}\n       there are: {', '.join(every)}")
    return every[name]


def cut(home: Home, address: str, other: str) -> None:
    """Let no packet pass between a pod and another address, by a rule in the pod's own network namespace."""
    with network_of(home, address) as inside:
        for chain, side in (("INPUT", "--source"), ("OUTPUT", "--destination")):
            run(*inside, "iptables", "--wait", "-A", chain, side, other, "--jump", "DROP")
    say(f"pod {address} is cut off from {other}")


def heal(home: Home, address: str) -> None:
    """Take back what `cut` did to a pod: it has no rules but those."""
    with network_of(home, address) as inside:
        run(*inside, "iptables", "--wait", "--flush")
    say(f"pod {address} is cut off from nobody")


@contextmanager
def network_of(home: Home, address: str) -> Iterator[tuple[str, ...]]:
    """What runs a command in the network namespace of the pod with this address."""
    states = [each.containerd_state for each in homes_of_nodes(home)]
    for namespace in (each for state in states for each in state.glob("*/netns/cni-*")):
        inside = ("nsenter", f"--net={namespace}")
        shown = subprocess.run([*inside, "ip", "-4", "-oneline", "address"], capture_output=True)
        if f" {address}/".encode() in shown.stdout:
            yield inside
            return
    raise ClusterError(f"no pod has the address {address}")


# --- common


def _require_up(home: Home) -> None:
    if not home.kubeconfig.exists():
        raise ClusterError(
            "the cluster is not up\n       start it: python tests/cluster/cluster.py up"
        )


def _ctr(home: Home) -> tuple[str, ...]:
    return "--address", str(home.containerd_socket), "--namespace", "k8s.io"


def _refuse_another_home(home: Home) -> None:
    """The namespace has one name on a machine, so there is one cluster on a machine."""
    for other in marked():
        if other != home.root:
            raise ClusterError(
                f"another cluster runs on this machine, from {other}\n"
                f"       end it: TRAINYARD_CLUSTER_HOME={other} python tests/cluster/cluster.py down"
            )


@contextmanager
def one_at_a_time(home: Home) -> Iterator[None]:
    home.root.mkdir(parents=True, exist_ok=True)
    with (home.root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another `cluster.py`")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def whole_number(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def commands_parser() -> argparse.ArgumentParser:
    """Each command has its words, and in `do` what is done with them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, do: Callable[..., object]) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text)
        made.set_defaults(do=do)
        return made

    command(
        "build",
        "install the Debian packages and build the servers that `up` needs",
        lambda home, options: (
            build.build_tools(home, say, options.sets)
            if options.sets
            else build.build_all(home, say)
        ),
    ).add_argument(
        "sets",
        nargs="*",
        metavar="SET",
        help="build only this folder of tools/, and install nothing",
    )
    up_command = command(
        "up",
        "build what is missing, then start a cluster or reuse the one that is up",
        lambda home, options: up(home, options.extras),
    )
    for name, extra in extras.EXTRAS.items():
        text = f"with {extra.text} in it; a cluster that has it is replaced without this option"
        up_command.add_argument(
            f"--{name}", action="append_const", dest="extras", const=name, default=[], help=text
        )
    command(
        "reload-prometheus",
        "have Prometheus read the monitors and rules that are in the cluster",
        lambda home, options: extras.reload_prometheus(home),
    )
    command(
        "down",
        "end the cluster; its image content is kept for the next one",
        lambda home, options: down(home, options.purge),
    ).add_argument("--purge", action="store_true", help="delete the image content, too")
    commands.add_parser("status", help="show how each part stands; exit code 1 if not all is ready")
    for name, text, take in (
        ("gpus", "let the node claim to have GPUs", set_gpus),
        ("kwok", "have nodes that do not exist, with 8 GPUs each", set_made_up_nodes),
    ):
        command(
            name, text, lambda home, options, take=take: take(home, options.count)
        ).add_argument("count", type=whole_number, help="how many; 0 takes them away")
    command(
        "nodes",
        "have so many real nodes",
        lambda home, options: set_nodes(home, options.count),
    ).add_argument(
        "count", type=int, choices=range(1, len(ADDED_NODES) + 2), help="how many there are then"
    )
    nodes = {node.name: node for node in ADDED_NODES}
    command(
        "lose-node",
        "a node loses its power; its Node stays",
        lambda home, options: lose_node(home, nodes[options.node]),
    ).add_argument("node", choices=nodes, help="its name")
    for name, text, of_part in (
        ("restart", "end one part and start it again", restart),
        ("stop", "end one part", stop_part),
        ("start", "start a part that was stopped", start_part),
    ):
        command(
            name, text, lambda home, options, of_part=of_part: of_part(home, options.part)
        ).add_argument("part", help="its name, as in the table of `status`")
    cutting = command(
        "cut",
        "let no packet pass between a pod and another address",
        lambda home, options: cut(home, options.address, options.other),
    )
    cutting.add_argument("address", help="of the pod")
    cutting.add_argument("other", help="address of the other")
    command(
        "heal",
        "let all packets of a pod pass again",
        lambda home, options: heal(home, options.address),
    ).add_argument("address", help="of the pod")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = commands_parser().parse_args(arguments)
    home = home_of(os.environ)
    # Debian's servers need programs that only root's own PATH has, which `su` and cron do not set.
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    try:
        if sys.platform != "linux" or (os.geteuid() != 0 and options.command != "build"):
            raise ClusterError(
                "the test cluster needs Linux and root\n       run this command as root"
            )
        if options.command == "status":
            return 0 if status(home) else 1
        with one_at_a_time(home):
            options.do(home, options)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
