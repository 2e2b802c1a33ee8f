"""Who may write into a run's folder: its newest attempt, and of that the newest worker group.

Files in `<run>/lease/`, none of which is ever changed by another process or removed:

    a3.json    the claim of attempt 3: the process of its driver, and where it runs
    a3.beat    its sign of life, another one every few seconds
    a3.ended   it was left in good order
    a3.1.json  the claim of its first worker group; a3.2.json after a restart of the workers

What this guarantees, on a disk, a shared volume and an object store with conditional writes:

* A claim is made by one process alone, with its content, and numbers only rise. So all agree on who is the
  newest, whatever their clocks say: clocks of two machines are never compared.
* A claim succeeds only if the attempt before has ended, is known to be dead (its process is gone, on this
  machine), or gave no new sign of life for as long as the claimant itself has watched for one.
* `Fence.check` raises for whoever is no longer the newest, as soon as the newer claim lies there. An attempt
  that was stopped, swapped out or cut off from the storage for an hour does not survive its next check.

What it does not: a check and the write that follows are two steps. Who is stopped between them writes
once more when it wakes. So what an older attempt commits after a newer one has begun must not be used;
`checkpointing/resume.py` sees to that. Where the storage has no conditional writes, two attempts that start
in the same second may both hold the lease, until one sees that the claim is not its own; the output says so.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

from trainyard_trainer.errors import RunError
from trainyard_trainer.run_files.lease import (
    CLAIM,
    HEARTBEAT_S,
    STALE_S,
    claim_file,
    ended_file,
    heartbeat_file,
)
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.progress import read_lines

Say = Callable[[str], None]


class Fenced(RunError):
    """A newer attempt, or a newer worker group of this attempt, has taken over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """How long is waited for what."""

    heartbeat_s: float = HEARTBEAT_S
    """Between two signs of life."""

    stale_s: float = STALE_S
    """Without a new sign of life an attempt is taken for dead after so long."""

    wait_s: float = 120.0
    """How long the end of a living attempt is waited for. A pod that is told to go may take this long."""

    say_s: float = 10.0
    """Between two lines that say who is waited for."""

    poll_s: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The process that has claimed a run."""

    pid: int
    started: int
    """In ticks since the machine started: a process number may be used again."""

    host: str
    boot_id: str
    pid_namespace: str
    """Two pods may share a machine: each has its own process 1."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @classmethod
    def here(cls) -> Holder:
        """This process."""
        pid = os.getpid()
        started = _start_time(pid)
        assert started is not None
        return cls(
            pid=pid,
            started=started,
            host=socket.gethostname(),
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            pid_namespace=str(Path("/proc/self/ns/pid").readlink()),
        )

    def is_in_sight(self) -> bool:
        """Whether its processes are those that can be seen from here."""
        here = Holder.here()
        return (self.host, self.boot_id, self.pid_namespace) == (
            here.host,
            here.boot_id,
            here.pid_namespace,
        )

    def is_alive(self) -> bool:
        """Only of a holder in sight."""
        return _start_time(self.pid) == self.started


def _start_time(pid: int) -> int | None:
    """Of a living process, in ticks since the machine started."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, in brackets, may hold blanks and brackets itself. A zombie does nothing any more.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


@dataclass(frozen=True, slots=True)
class Fence:
    """Tells a driver (group 0) or rank 0 of a worker group whether it may still write."""

    folder: RunFolder
    attempt: int
    group: int = 0

    @classmethod
    def claim(cls, folder: RunFolder, attempt: int) -> Fence:
        """The fence of a new worker group. Claim it before reading where to go on. Raises Fenced."""
        while True:
            fence = cls(folder, attempt, 1 + newest_group(folder, attempt))
            claim = _make_claim(fence.attempt, fence.group, Holder.here())
            if folder.create(fence.path, claim):
                fence.check()
                return fence

    @property
    def path(self) -> str:
        """Where its claim lies."""
        return f"{self.folder.root}/{claim_file(self.attempt, self.group)}"

    def check_in_sight(self) -> None:
        """Whether this machine sees the claim at all. Raises Fenced.

        Asks for the one file: NFS may answer a listing from what it saw a minute ago.
        """
        if not self.folder.exists(self.path):
            raise self.gone()

    def check(self) -> None:
        """Look at the storage once. Raises Fenced, or OSError where the storage cannot be read."""
        if (self.attempt, self.group) not in self.check_newer():
            raise self.gone()

    def gone(self) -> Fenced:
        """The error for a claim that is not there, or not the one that was made."""
        return Fenced(
            f"the claim {self.folder.show(self.path)} is gone, or was never to be seen on "
            f"{socket.gethostname()}: the run's folder was removed, or set aside, or begun anew, or "
            "lies on a disk of another machine.\n       Nothing more is saved here. Start the run "
            "again, on storage that all machines of the run see."
        )

    def check_newer(self) -> list[tuple[int, int]]:
        """All claims. Raises Fenced if one of them is newer."""
        claims = _claims(self.folder)
        attempt, group = max(claims, default=(0, 0))
        if attempt > self.attempt:
            raise Fenced(
                f"attempt {attempt} has taken over from attempt {self.attempt}, which gave no sign of "
                "life.\n       Nothing more is saved here; the run goes on there."
            )
        if self.group and attempt == self.attempt and group > self.group:
            raise Fenced(
                f"worker group {group} has taken over from worker group {self.group} of attempt "
                f"{attempt}.\n       Nothing more is saved here; the run goes on there."
            )
        return claims


class Lease:
    """A run that this process holds, for as long as it is in the `with` block and not fenced.

    A thread writes signs of life, and looks for those who have taken over.
    """

    def __init__(self, fence: Fence, claim: str, say: Say, times: Times) -> None:
        self.attempt = fence.attempt
        self._folder = fence.folder
        self._fence = fence
        self._claim = claim.encode()
        self._say = say
        self._times = times
        self._fenced: Fenced | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._live, name="lease", daemon=True)

    @classmethod
    def acquire(
        cls,
        folder: RunFolder,
        say: Say = print,
        *,
        times: Times | None = None,
        holder: Holder | None = None,
    ) -> Lease:
        """Claim the run for a new attempt, as soon as the one before has ended.

        Raises RunError: at once if that one is a living process of this machine, else after `wait_s`.
        """
        times, holder = times or Times(), holder or Holder.here()
        try:
            # Of all who find the way free at the same time one wins; the others look again.
            while True:
                newest = max((attempt for attempt, _ in _claims(folder)), default=0)
                if newest:
                    _await_end(folder, newest, say, times)
                recorded = (line["attempt"] for line in read_lines(folder, folder.attempts))
                fence = Fence(folder, 1 + max(newest, *recorded, 0))
                claim = _make_claim(fence.attempt, fence.group, holder)
                if folder.create(fence.path, claim):
                    break
            if folder.exclusion_gap:
                say(
                    "lease: two attempts that start in the same second might both go on for a while: "
                    + folder.exclusion_gap
                )
        except OSError as error:
            raise RunError(
                f"the run's folder {folder.show(folder.root)} cannot be claimed: {error}\n"
                "       It must be on a disk or in a bucket that this machine may read and write."
            ) from error
        return cls(fence, claim, say, times)

    @property
    def is_fenced(self) -> bool:
        """Whether the thread has seen a newer attempt; asks no storage."""
        return self._fenced is not None

    def check(self) -> None:
        """Raises Fenced if a newer attempt has taken over, or OSError where the storage cannot be read."""
        if self._fenced:
            raise self._fenced
        self._fence.check()
        if self._folder.read(self._fence.path) != self._claim:
            raise self._fence.gone()

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._fenced:
            return
        try:
            self._folder.write(f"{self._folder.root}/{ended_file(self.attempt)}", _now() + "\n")
        except OSError as trouble:
            self._say(
                f"lease: it could not be given back, so the next attempt waits "
                f"{self._times.stale_s:g} s: {trouble}"
            )

    def _live(self) -> None:
        path = f"{self._folder.root}/{heartbeat_file(self.attempt)}"
        count, is_in_trouble = 0, False
        while True:
            count += 1
            try:
                self._folder.write(path, f"{count} {_now()}\n", is_durable=False)
                self.check()
                is_in_trouble = False
            except Fenced as fenced:
                self._fenced = fenced
                self._say(f"lease: {fenced}")
                return
            except OSError as trouble:
                # The storage may come back. Until then nobody can claim the run there either.
                if not is_in_trouble:
                    self._say(f"lease: no sign of life could be written: {trouble}")
                is_in_trouble = True
            if self._stop.wait(self._times.heartbeat_s):
                return


def refuse_if_live(folder: RunFolder, say: Say = print) -> None:
    """Raises RunError while an attempt is alive. On another machine that shows at its next sign of life."""
    newest = max((attempt for attempt, _ in _claims(folder)), default=0)
    if newest:
        _await_end(folder, newest, say, Times(wait_s=0.0))


def newest_group(folder: RunFolder, attempt: int) -> int:
    """Number of the attempt's newest worker group; 0 while it has none."""
    return max((group for number, group in _claims(folder) if number == attempt), default=0)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _claims(folder: RunFolder) -> list[tuple[int, int]]:
    """Attempt and worker group of each claim; a driver's own has group 0."""
    matches = (CLAIM.fullmatch(name) for name in folder.file_names(folder.lease))
    return [(int(match[1]), int(match[2] or 0)) for match in matches if match]


def _make_claim(attempt: int, group: int, holder: Holder) -> str:
    claim = {
        "attempt": attempt,
        "group": group,
        "holder": asdict(holder),
        "time": _now(),
        "id": uuid.uuid4().hex,  # no two claims are equal
    }
    return json.dumps(claim, indent=2) + "\n"


def _await_end(folder: RunFolder, attempt: int, say: Say, times: Times) -> None:
    """Return when the attempt has ended or must be dead. Raises RunError if it lives on."""
    if folder.exists(f"{folder.root}/{ended_file(attempt)}"):
        return
    holder = _read_holder(folder, attempt)
    if holder and holder.is_in_sight():
        if holder.is_alive():
            raise RunError(
                f"the run {folder.name} is being trained already: by attempt {attempt}, "
                f"{holder}.\n       Wait for its end, or stop it (kill {holder.pid}), and start again: "
                "the run goes on where it stopped."
            )
        say(f"lease: attempt {attempt}, {holder}, is dead")
        return
    _await_silence(folder, attempt, holder, say, times)


def _await_silence(
    folder: RunFolder, attempt: int, holder: Holder | None, say: Say, times: Times
) -> None:
    """Return when an attempt out of sight has ended, or gave no sign of life for long enough."""
    who = f"attempt {attempt}, {holder or 'an unknown process'},"
    beat: bytes | None = None
    began = seen = said = time.monotonic()
    deadline = began + times.wait_s
    while not folder.exists(f"{folder.root}/{ended_file(attempt)}"):
        # The times are taken so that a pause of this process never looks like one of the other.
        now = time.monotonic()
        latest = _read_beat(folder, attempt)
        if latest == beat and now - seen >= times.stale_s:
            say(f"lease: {who} gave no sign of life for {now - seen:.0f} s: it is taken for dead")
            return
        if latest != beat and beat is not None and now >= deadline:
            raise RunError(
                f"the run {folder.name} is being trained already: {who} still gives signs of life "
                f"after {now - began:.0f} s.\n       Wait for its end, or stop it there (on a cluster: "
                f"trainyard stop {folder.name}), and start again: the run goes on where it stopped."
            )
        if latest != beat:
            beat, seen = latest, time.monotonic()
        if now >= said:
            wait = f"waiting for the end of {who} at most {deadline - now:.0f} s more"
            say(f"lease: {wait if now < deadline else f'watching {who} for a sign of life'}")
            said = now + times.say_s
        time.sleep(times.poll_s)


def _read_holder(folder: RunFolder, attempt: int) -> Holder | None:
    """None for a claim whose content is not there yet, or of another version of this program."""
    try:
        claim = json.loads(folder.read(f"{folder.root}/{claim_file(attempt)}"))
        return Holder(**claim["holder"])
    except (ValueError, KeyError, TypeError):
        return None


def _read_beat(folder: RunFolder, attempt: int) -> bytes:
    try:
        return folder.read(f"{folder.root}/{heartbeat_file(attempt)}")
    except FileNotFoundError:
        return b""
