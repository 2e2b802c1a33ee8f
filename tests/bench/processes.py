"""Memory of running processes, from Linux' own accounts in /proc."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process as it is now."""

    pid: int
    command: str
    own_bytes: int
    """Memory that is its own: neither a file nor shared."""


def descendants(pid: int) -> list[Process]:
    """The process's children, their children, and so on; without those that end meanwhile."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found, open_pids = [], [pid]
    while open_pids:
        for child in children.get(open_pids.pop(), []):
            open_pids.append(child)
            if (process := look_at(child)) is not None:
                found.append(process)
    return found


def look_at(pid: int) -> Process | None:
    """None if it has ended."""
    try:
        command = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        status = (PROC / str(pid) / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    known = dict(line.split(":", 1) for line in status.splitlines())
    if "RssAnon" not in known:  # a zombie
        return None
    return Process(pid=pid, command=command, own_bytes=int(known["RssAnon"].split()[0]) * 1024)


def _parent(entry: Path) -> int | None:
    try:
        stat = (entry / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in brackets may hold anything, brackets too.
    return int(stat.rpartition(")")[2].split()[1])


def started_at(pid: int) -> float:
    """The time.time() at which a process started, to a hundredth of a second."""
    ticks = int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19])
    uptime_s = float((PROC / "uptime").read_text().split()[0])
    return time.time() - uptime_s + ticks / os.sysconf("SC_CLK_TCK")


def object_store_bytes(raylet: int) -> int:
    """What Ray's object store of this raylet has taken of memory: pages of its file that are in use."""
    files = {}
    for descriptor in (PROC / str(raylet) / "fd").iterdir():
        with suppress(FileNotFoundError):
            if "plasma" in str(descriptor.readlink()):
                status = descriptor.stat()
                files[status.st_ino] = status.st_blocks * 512
    return sum(files.values())


class CpuSeconds:
    """CPU seconds of a process and of all that it has started, as far as they were seen in `look`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: dict[tuple[int, int], float] = {}

    def look(self) -> float:
        """Take the processes' accounts; return the sum, with the newest account of those that are gone."""
        for pid in (self._pid, *(process.pid for process in descendants(self._pid))):
            with suppress(FileNotFoundError, ProcessLookupError):
                fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
                ticks = int(fields[11]) + int(fields[12])
                self._seen[pid, int(fields[19])] = ticks / os.sysconf("SC_CLK_TCK")
        return sum(self._seen.values())
