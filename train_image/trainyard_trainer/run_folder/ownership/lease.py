"""The lease of a run: it gives one attempt at a time the right to write to the run's folder.

Files in `<run>/lease/`; no other process ever changes or removes one of them:

    a3.json    the claim of attempt 3: the process of its driver, and its machine
    a3.beat    its heartbeat, rewritten every few seconds
    a3.ended   the attempt ended and gave the lease back
    a3.1.json  the claim of its first worker group; a3.2.json after a restart of the workers

Guarantees, on a disk, a shared volume and an object store with conditional writes:

* A claim is made by exactly one process, with its content, and the numbers only rise. So all processes agree
  on the newest claim; clocks of two machines are never compared.
* A claim succeeds only if the attempt before it has ended, is known to be dead (its process is gone, on this
  machine), or made no new heartbeat while the claiming process has watched it for `stale_s`.
* `Fence.check` raises Fenced as soon as a newer claim exists. An attempt that was stopped, swapped out or cut
  off from the storage for an hour does not pass its next check.

Limitation: a check and the write that follows are two steps. A process that is stopped between them writes
once more when it continues. So what an older attempt commits after a newer one has begun must not be used,
which `checkpointing/resume.py` ensures. If the storage has no conditional writes, two attempts that start in
the same second may both hold the lease until one sees that the claim is not its own; the output says so.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from types import TracebackType

from trainyard_trainer.errors import RunError, StorageError
from trainyard_trainer.run_files.lease import (
    HEARTBEAT_S,
    STALE_S,
    claim_file,
    ended_file,
    heartbeat_file,
)
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import read_lines
from trainyard_trainer.run_folder.ownership.claim_holder import ClaimHolder
from trainyard_trainer.run_folder.ownership.fence import Fence, Fenced, claims_of, make_claim


class RunIsLive(RunError):
    """Another attempt trains the run: this one has nothing to do with how it ends."""


Say = Callable[[str], None]
"""Prints one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseTimes:
    """The intervals and time limits of a lease."""

    heartbeat_s: float = HEARTBEAT_S
    """Seconds between two heartbeats."""

    stale_s: float = STALE_S
    """An attempt without a new heartbeat for so many seconds is dead."""

    wait_s: float = 120.0
    """Seconds to wait for the end of a living attempt. A pod that is being deleted may take this long."""

    say_s: float = 10.0
    """Seconds between two lines that name the attempt that is waited for."""

    poll_s: float = 1.0
    """Seconds between two checks whether the attempt has ended."""


class Lease:
    """The claim of this process's attempt to a run, valid inside the `with` block until it is fenced.

    A thread writes heartbeats and checks for newer claims.
    """

    def __init__(self, fence: Fence, claim: str, say: Say, times: LeaseTimes) -> None:
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
        times: LeaseTimes | None = None,
        holder: ClaimHolder | None = None,
    ) -> Lease:
        """Claim the run for a new attempt, as soon as the attempt before it has ended.

        Raises RunIsLive if that attempt lives on: at once if it is a process of this machine, else after
        `wait_s`.
        """
        times, holder = times or LeaseTimes(), holder or ClaimHolder.current()
        # If several processes claim the run at the same time, one succeeds and the others start over.
        while True:
            newest = max((attempt for attempt, _ in claims_of(folder)), default=0)
            if newest:
                _await_end(folder, newest, say, times)
            recorded = (line["attempt"] for line in read_lines(folder, folder.attempts))
            fence = Fence(folder, 1 + max(newest, *recorded, 0))
            claim = make_claim(fence.attempt, fence.group, holder)
            if folder.create(fence.path, claim):
                break
        if folder.exclusion_gap:
            say(
                "lease: two attempts that start in the same second might both go on for a while: "
                + folder.exclusion_gap
            )
        return cls(fence, claim, say, times)

    @property
    def is_fenced(self) -> bool:
        """Whether the thread has seen a newer claim; does not access the storage."""
        return self._fenced is not None

    def check(self) -> None:
        """Raise Fenced if a newer attempt has taken over; StorageError if the storage cannot be read."""
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
        except StorageError as trouble:
            self._say(
                f"lease: it could not be given back, so the next attempt waits "
                f"{self._times.stale_s:g} s: {trouble.problem}"
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
            except StorageError as trouble:
                # The storage may come back. Until then no other attempt can claim the run there either.
                if not is_in_trouble:
                    self._say(f"lease: no sign of life could be written: {trouble.problem}")
                is_in_trouble = True
            if self._stop.wait(self._times.heartbeat_s):
                return


def refuse_if_live(folder: RunFolder, say: Say = print) -> None:
    """Raise RunIsLive if an attempt is alive; on another machine that shows at its next heartbeat."""
    newest = max((attempt for attempt, _ in claims_of(folder)), default=0)
    if newest:
        _await_end(folder, newest, say, LeaseTimes(wait_s=0.0))


def _await_end(folder: RunFolder, attempt: int, say: Say, times: LeaseTimes) -> None:
    """Return when the attempt has ended or is dead. Raises RunIsLive if it lives on."""
    if folder.exists(f"{folder.root}/{ended_file(attempt)}"):
        return
    holder = _read_holder(folder, attempt)
    if holder and holder.is_visible():
        if holder.is_orphaned():
            _await_orphan(folder, attempt, holder, say, times)
        if holder.is_alive() and not folder.exists(f"{folder.root}/{ended_file(attempt)}"):
            raise RunIsLive(
                f"the run {folder.name} is being trained already: by attempt {attempt}, "
                f"{holder}.\n       Wait for its end, or stop it (kill {holder.pid}), and start again: "
                "the run goes on where it stopped."
            )
        if not folder.exists(f"{folder.root}/{ended_file(attempt)}"):
            say(f"lease: attempt {attempt}, {holder}, is dead")
        return
    _await_silence(folder, attempt, holder, say, times)


def _await_orphan(
    folder: RunFolder, attempt: int, holder: ClaimHolder, say: Say, times: LeaseTimes
) -> None:
    """Wait until an attempt whose front end was killed has saved and ended, for `wait_s` at most."""
    deadline = time.monotonic() + times.wait_s
    said = time.monotonic()
    while holder.is_alive() and not folder.exists(f"{folder.root}/{ended_file(attempt)}"):
        now = time.monotonic()
        if now >= deadline:
            return
        if now >= said:
            say(
                f"lease: the command that started attempt {attempt}, {holder}, was killed: waiting at most "
                f"{deadline - now:.0f} s until the attempt has saved and ended"
            )
            said = now + times.say_s
        time.sleep(min(times.poll_s, 0.2))


def _await_silence(
    folder: RunFolder, attempt: int, holder: ClaimHolder | None, say: Say, times: LeaseTimes
) -> None:
    """Wait until an attempt of another machine has ended, or had no new heartbeat for `stale_s`."""
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
            raise RunIsLive(
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


def _read_holder(folder: RunFolder, attempt: int) -> ClaimHolder | None:
    """Return the process of a claim; None if the file is incomplete or of another version."""
    try:
        claim = json.loads(folder.read(f"{folder.root}/{claim_file(attempt)}"))
        holder = claim["holder"]
        front_end = holder.pop("front_end", None)
        return ClaimHolder(**holder, front_end=front_end and tuple(front_end))
    except (ValueError, KeyError, TypeError):
        return None


def _read_beat(folder: RunFolder, attempt: int) -> bytes:
    try:
        return folder.read(f"{folder.root}/{heartbeat_file(attempt)}")
    except FileNotFoundError:
        return b""


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
