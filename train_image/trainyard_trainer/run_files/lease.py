"""The files and times of the lease: which attempt may write to a run's folder.

The protocol itself is in `run_folder.lease`; the launcher only reads whether an attempt is alive.
"""

from __future__ import annotations

import re

from trainyard_trainer.run_files.names import LEASE

HEARTBEAT_S = 5.0
"""Seconds between two heartbeats of an attempt."""

STALE_S = 20.0
"""An attempt without a new heartbeat for so many seconds is dead."""

CLAIM = re.compile(r"a(\d+)(?:\.(\d+))?\.json")
"""The file name of a claim: of an attempt, or of one of its worker groups."""


def claim_file(attempt: int, group: int = 0) -> str:
    """Return the path of a claim: of an attempt, or of its worker group `group` (from 1)."""
    return f"{LEASE}/{holder_of(attempt, group)}.json"


def heartbeat_file(attempt: int) -> str:
    """Return the path of the file that an attempt writes every `HEARTBEAT_S`."""
    return f"{LEASE}/a{attempt}.beat"


def ended_file(attempt: int) -> str:
    """Return the path of the file that an attempt writes when it gives the lease back."""
    return f"{LEASE}/a{attempt}.ended"


def stop_file(attempt: int, group: int = 0) -> str:
    """Return the path of the file that asks an attempt, or one of its worker groups, to save and stop."""
    return f"{LEASE}/{holder_of(attempt, group)}.stop"


def holder_of(attempt: int, group: int = 0) -> str:
    """Return the name of an attempt or of one of its worker groups in file names: `a3`, `a3.2`."""
    return f"a{attempt}.{group}" if group else f"a{attempt}"


def attempts_of(files: list[str]) -> list[int]:
    """Return the attempts that have claimed a run, oldest first, given the paths of the run's files."""
    names = [file.removeprefix(f"{LEASE}/") for file in files if file.startswith(f"{LEASE}/")]
    claims = [match for name in names if (match := CLAIM.fullmatch(name))]
    return sorted(int(match[1]) for match in claims if match[2] is None)
