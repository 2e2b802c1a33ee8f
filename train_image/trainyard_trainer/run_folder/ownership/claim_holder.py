"""The process that holds a claim: how another process finds out whether it is still alive."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from trainyard_trainer import front_end


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimHolder:
    """The process that has claimed a run."""

    pid: int
    started: int
    """The start time, in clock ticks since the machine booted: a process id may be reused."""

    host: str
    boot_id: str
    pid_namespace: str
    """The PID namespace: two pods on one machine both have a process 1."""

    front_end: tuple[int, int] | None = None
    """The process id and start time of the command on this machine that shows its output, if there is one."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def current(cls) -> ClaimHolder:
        """Return the holder that stands for the current process."""
        pid = os.getpid()
        started = start_time(pid)
        assert started is not None
        return cls(
            pid=pid,
            started=started,
            host=socket.gethostname(),
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            pid_namespace=str(Path("/proc/self/ns/pid").readlink()),
            front_end=_current_front_end(),
        )

    def is_visible(self) -> bool:
        """Whether this process can see the holder's processes: same machine, boot and PID namespace."""
        current = ClaimHolder.current()
        return (self.host, self.boot_id, self.pid_namespace) == (
            current.host,
            current.boot_id,
            current.pid_namespace,
        )

    def is_alive(self) -> bool:
        """Whether the process still runs; only valid for a visible holder."""
        return start_time(self.pid) == self.started

    def is_orphaned(self) -> bool:
        """Whether the holder had a front end that is gone; only valid for a visible holder."""
        if self.front_end is None:
            return False
        pid, started = self.front_end
        return start_time(pid) != started


def _current_front_end() -> tuple[int, int] | None:
    """Return the process id and start time of this process's front end; 0 for one that is gone already."""
    pid = front_end.pid()
    return None if pid is None else (pid, start_time(pid) or 0)


def start_time(pid: int) -> int | None:
    """Return when a living process started, in clock ticks since the boot; None for a dead one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in parentheses, may contain blanks and parentheses. A zombie counts as dead.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
