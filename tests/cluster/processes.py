"""Processes that `up` starts: written down with their start time, so that `down` ends these and no others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

MARK = "TRAINYARD_CLUSTER_PART"
"""Environment variable of each process of a cluster: the cluster's home."""


@dataclass(frozen=True)
class Process:
    """A process id alone may belong to somebody else by now; with its start time it cannot."""

    name: str
    pid: int
    started: int
    """Clock ticks since the machine started."""

    def is_alive(self) -> bool:
        return start_time(self.pid) == self.started


class Ledger:
    """The processes of a cluster, on disk from the moment that each one runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            saved = json.loads(path.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            saved = {}
        self.fingerprint: str = saved.get("fingerprint", "")
        # After a restart of the machine the same numbers mean other processes.
        same_boot = saved.get("boot") == _boot()
        self.processes = [Process(**entry) for entry in saved["processes"]] if same_boot else []

    def find(self, name: str) -> Process | None:
        return next((process for process in self.processes if process.name == name), None)

    def start(self, name: str, command: Sequence[str], log: Path, home: Path) -> None:
        """Start a process that outlives this program."""
        with log.open("wb") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd="/",
                env={**_environment(), MARK: str(home)},
                start_new_session=True,
            )
        # It is our child and not waited for, so its entry in /proc is there even if it ended at once.
        started = parse_stat(Path(f"/proc/{child.pid}/stat").read_text())[1]
        others = [process for process in self.processes if process.name != name]
        self.processes = [*others, Process(name, child.pid, started)]
        self._save()

    def begin(self, fingerprint: str) -> None:
        self.fingerprint, self.processes = fingerprint, []
        self._save()

    def stop(self, names: Iterable[str], patience_s: float = 10) -> None:
        wanted = set(names)
        end_all([p for p in self.processes if p.name in wanted], patience_s)

    def remove(self) -> None:
        self.processes = []
        self._path.unlink(missing_ok=True)

    def _save(self) -> None:
        content = {
            "boot": _boot(),
            "fingerprint": self.fingerprint,
            "processes": [asdict(process) for process in self.processes],
        }
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps(content, indent=2))
        draft.replace(self._path)


def _environment() -> dict[str, str]:
    """Ours, without what is of this program alone.

    Proxies: nothing outside can be reached, and what is inside must be reached directly. The folder of the
    login: it may end with the login, or not be there, and runc writes a file there for each exec.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy") and name != "XDG_RUNTIME_DIR"
    }


def end_all(processes: Sequence[Process], patience_s: float) -> None:
    """SIGTERM, and SIGKILL for those that are still there when patience ends."""
    for how, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 5.0)):
        for process in processes:
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, how)
        deadline = time.monotonic() + wait_s
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)


def start_time(pid: int) -> int | None:
    """The start time of a process; None if there is none, or only its entry waits to be collected."""
    try:
        state, started = parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else started


def parse_stat(text: str) -> tuple[str, int]:
    """State and start time out of /proc/PID/stat. The program's name may hold blanks and brackets."""
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])


def marked() -> dict[Path, list[Process]]:
    """By the cluster's home: all processes that its `up` started, directly or through containerd."""
    found: dict[Path, list[Process]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        homes = [
            entry.split(b"=", 1)[1]
            for entry in environment
            if entry.startswith(f"{MARK}=".encode())
        ]
        started = start_time(int(folder.name))
        if homes and started is not None:
            process = Process("left over", int(folder.name), started)
            found.setdefault(Path(os.fsdecode(homes[0])), []).append(process)
    return found


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
