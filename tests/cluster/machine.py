"""What the cluster takes from the machine's kernel: a network namespace, a cgroup, mounts."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from layout import ClusterError
from parts import CGROUP, NODE_NETWORK, SERVICE_NETWORK

NAMESPACE = Path("/run/netns/trainyard")
CGROUPS = Path("/sys/fs/cgroup")
CPU_SHARES = 1024 * (os.cpu_count() or 1)
"""The CPU shares of all pods together: on each CPU those of one process outside. With fewer, the pods starve
beside commands; with more, the API server and the commands do, and a command takes a minute."""
CLONE_NEWNET = 0x40000000
PACKETS = ("iptables", "--wait", "--table", "mangle")
SILENCED = (("PREROUTING", "--source"), ("FORWARD", "--destination"))


def run(*command: str | Path, stdin: str | None = None) -> str:
    """The standard output of a command that must succeed."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True)
    if done.returncode:
        text = (done.stderr or done.stdout).strip()
        raise ClusterError(
            f"{' '.join(map(str, command))} failed ({done.returncode})\n       {text}"
        )
    return done.stdout


# --- network


def make_namespace() -> None:
    """A network namespace with the node's address and no way out."""
    run("ip", "netns", "add", NAMESPACE.name)


@contextmanager
def inside_namespace() -> Iterator[None]:
    """This program, and all that it starts, is in the namespace for a while.

    `ip netns exec` would do the same and also replace /sys, which hides the cgroups from the kubelet.
    """
    with Path("/proc/self/ns/net").open() as outside:
        with NAMESPACE.open() as namespace:
            _enter(namespace)
        try:
            yield
        finally:
            _enter(outside)


def _enter(namespace: TextIO) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # Python itself can do this from 3.12 on
    if libc.setns(namespace.fileno(), CLONE_NEWNET):
        raise ClusterError(f"cannot enter {namespace.name}: {os.strerror(ctypes.get_errno())}")


def set_up_network() -> None:
    """Call it inside the namespace. A bridge carries the address, since not every kernel has dummy links."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "node0", "type", "bridge")
    run("ip", "address", "add", NODE_NETWORK, "dev", "node0")
    run("ip", "link", "set", "node0", "up")
    for setting in ("ip_forward", "conf/all/route_localnet"):
        Path("/proc/sys/net/ipv4", setting).write_text("1")


def add_address(network: str) -> None:
    """Call it inside the namespace: one more address of the machine, for one more node."""
    run("ip", "address", "replace", network, "dev", "node0")


def route_services() -> None:
    """Call it inside the namespace: the machine's own processes reach services, as those in pods do."""
    run("ip", "route", "replace", SERVICE_NETWORK, "dev", "node0")


def own_addresses(network: str) -> None:
    """Call it inside the namespace: whoever listens there on all addresses answers for those, too."""
    run("ip", "route", "replace", "local", network, "dev", "lo")


def silence(network: str) -> None:
    """Call it inside the namespace: no packet comes from there any more, none of a pod elsewhere arrives."""
    for chain, side in SILENCED:
        run(*PACKETS, "--append", chain, side, network, "--jump", "DROP")


def end_silence(network: str) -> None:
    """Call it inside the namespace: take back what `silence` did, however often."""
    for chain, side in SILENCED:
        rule = (*PACKETS, "--delete", chain, side, network, "--jump", "DROP")
        while not subprocess.run(rule, capture_output=True).returncode:
            pass


def delete_namespace() -> None:
    """Links, addresses and packet filter rules go with it."""
    if NAMESPACE.exists():
        run("ip", "netns", "delete", NAMESPACE.name)


# --- cgroup


def cgroup_hierarchies() -> list[Path]:
    """The one hierarchy of cgroup v2, or each of v1's."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    # Controllers that share a hierarchy also have links with their own names.
    return [
        path
        for path in CGROUPS.iterdir()
        if (path / "cgroup.procs").exists() and not path.is_symlink()
    ]


def make_cgroup(name: str = CGROUP) -> None:
    for hierarchy in cgroup_hierarchies():
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        if (
            hierarchy / "cgroup.controllers"
        ).exists():  # v2: children get no controller unless told
            for parent in (group.parent, group):
                for controller in (parent / "cgroup.controllers").read_text().split():
                    _try_write(parent / "cgroup.subtree_control", f"+{controller}")
        for file in (
            "cpuset.cpus",
            "cpuset.mems",
        ):  # v1: a new cpuset is empty and takes no process
            if (group.parent / file).exists() and (group / file).exists():
                (group / file).write_text((group.parent / file).read_text())
        _try_write(group / "cpu.shares", str(CPU_SHARES))  # v1
        _try_write(group / "cpu.weight", str(CPU_SHARES * 100 // 1024))  # v2


def end_cgroup(name: str = CGROUP, patience_s: float = 20) -> None:
    """Kill all that runs in the pods' cgroup, and remove it. This needs neither kubelet nor containerd."""
    deadline = time.monotonic() + patience_s
    while groups := list(_groups_deepest_first(name)):
        for group in groups:
            for pid in map(int, _read(group / "cgroup.procs").split()):
                _kill(pid)
            with suppress(OSError):  # not empty yet
                group.rmdir()
        if time.monotonic() > deadline:
            raise ClusterError(
                f"cgroup {groups[0]} cannot be emptied within {patience_s:.0f} s\n"
                f"       processes: {_read(groups[0] / 'cgroup.procs').split()}"
            )
        time.sleep(0.05)


def _groups_deepest_first(name: str) -> Iterator[Path]:
    for hierarchy in cgroup_hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            yield Path(folder)


def _kill(pid: int) -> None:
    # 0 stands for a process that cannot be seen from here; to kill 0 means to kill oneself.
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _try_write(path: Path, text: str) -> None:
    with suppress(OSError):  # a controller that this machine cannot delegate
        path.write_text(text)


# --- mounts


def unmount_below(folder: Path) -> None:
    for target in mounts_below(folder, Path("/proc/self/mountinfo").read_text()):
        # Lazily: whoever still looks at it was killed a moment ago.
        run("umount", "--lazy", target)


def mounts_below(folder: Path, mountinfo: str) -> list[Path]:
    """Mount points in or below a folder, the latest first."""
    escaped = (line.split()[4] for line in mountinfo.splitlines())
    targets = [Path(text.encode().decode("unicode_escape")) for text in escaped]
    return [target for target in reversed(targets) if target.is_relative_to(folder)]
