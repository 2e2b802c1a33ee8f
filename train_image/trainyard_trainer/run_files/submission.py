"""What was submitted, as it lies in the run's folder: with it the launcher renders the same once more.

The launcher reads this module, too, and so it needs no more than the config does.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from trainyard_trainer.run_files.names import CODE

if TYPE_CHECKING:
    from tarfile import TarInfo

VARIABLE = "TRAINYARD_SUBMISSION"
"""The environment variable of the head that tells what the config does not: image, pools, queue, network,
and the hash of each part of the RayJob."""

SOURCE_VARIABLE = "TRAINYARD_SOURCE"
"""The environment variable of the head with the git revision from which the run was submitted, as JSON.
It is added to the RayJob after its name was computed, so that a commit does not make another submission."""

ROOM = 64 * 2**20
RATIO = 20


def code_file(sha256: str) -> str:
    """The archive of that SHA-256, in the run's folder. It goes by its content: what one submission needs
    is never overwritten by the next, which may be uploaded before the last driver has ended."""
    return f"{CODE}/{sha256}.tar.gz"


def unpacked_limit(packed: int) -> int:
    """Bytes to which an archive of so many bytes may unpack: what unpacks to more is no code."""
    return max(ROOM, RATIO * packed)


def is_plain_file(member: TarInfo) -> bool:
    """Whether what somebody else has packed is a file of the bytes that it brings, below where it unpacks.

    Not so are links, devices and folders, paths that lead away, holes (a few bytes on the way and as many as
    they say on the disk), and a size below zero, which would make room for what comes behind it.
    """
    path = PurePosixPath(member.name)
    is_file = member.isreg() and not member.issparse() and member.size >= 0
    return is_file and not path.is_absolute() and ".." not in path.parts
