"""Fencing: only the newest attempt, and its newest worker group, may write to a run's folder.

`lease.py` describes the protocol and the files.
"""

from __future__ import annotations

import json
import socket
import uuid
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

from trainyard_trainer.errors import RunError
from trainyard_trainer.run_files.lease import CLAIM, claim_file
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.ownership.claim_holder import ClaimHolder


class Fenced(RunError):
    """A newer attempt, or a newer worker group of this attempt, has taken over: nothing more may be
    written."""


@dataclass(frozen=True, slots=True)
class Fence:
    """The claim of an attempt (group 0) or of one of its worker groups: it may write while it is the
    newest."""

    folder: RunFolder
    attempt: int
    group: int = 0

    @classmethod
    def claim(cls, folder: RunFolder, attempt: int) -> Fence:
        """Claim the attempt for a new worker group. Do this before choosing the checkpoint. Raises Fenced."""
        while True:
            fence = cls(folder, attempt, 1 + newest_group(folder, attempt))
            claim = make_claim(fence.attempt, fence.group, ClaimHolder.current())
            if folder.create(fence.path, claim):
                fence.check()
                return fence

    @property
    def path(self) -> str:
        """The path of the claim's file."""
        return f"{self.folder.root}/{claim_file(self.attempt, self.group)}"

    def check_visible(self) -> None:
        """Raise Fenced if this machine does not see the claim's file.

        This asks for the one file: NFS may answer a directory listing from a cache that is a minute old.
        """
        if not self.folder.exists(self.path):
            raise self.gone()

    def check(self) -> None:
        """Raise Fenced if a newer claim exists or this one is gone.

        Raises StorageError if the storage cannot be read.
        """
        if (self.attempt, self.group) not in self.check_newer():
            raise self.gone()

    def gone(self) -> Fenced:
        """Return the error for a claim whose file is missing or was replaced."""
        return Fenced(
            f"the claim {self.folder.show(self.path)} is gone, or was never to be seen on "
            f"{socket.gethostname()}: the run's folder was removed, or set aside, or begun anew, or "
            "lies on a disk of another machine.\n       Nothing more is saved here. Start the run "
            "again, on storage that all machines of the run see."
        )

    def check_newer(self) -> list[tuple[int, int]]:
        """Return all claims, as attempt and group. Raises Fenced if one of them is newer."""
        claims = claims_of(self.folder)
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


def newest_group(folder: RunFolder, attempt: int) -> int:
    """Return the number of the attempt's newest worker group; 0 while it has none."""
    return max((group for number, group in claims_of(folder) if number == attempt), default=0)


def claims_of(folder: RunFolder) -> list[tuple[int, int]]:
    """Return attempt and worker group of each claim; the claim of a driver has group 0."""
    matches = (CLAIM.fullmatch(name) for name in folder.file_names(folder.lease))
    return [(int(match[1]), int(match[2] or 0)) for match in matches if match]


def make_claim(attempt: int, group: int, holder: ClaimHolder) -> str:
    """Return the content of a claim's file; no two claims are equal."""
    claim = {
        "attempt": attempt,
        "group": group,
        "holder": asdict(holder),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "id": uuid.uuid4().hex,
    }
    return json.dumps(claim, indent=2) + "\n"
