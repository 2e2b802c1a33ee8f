"""What was submitted, as it lies in the run's folder: with it the launcher renders the same once more.

The launcher reads this module, too, and so it needs no more than the config does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol

from trainer.config import CONFIG_VARIABLE

if TYPE_CHECKING:
    from tarfile import TarInfo

VARIABLE = "TRAINYARD_SUBMISSION"
"""The environment variable of the head that tells what the config does not: image, pools, queue, network,
and the hash of each part of the RayJob."""

FILE = "submission.json"
"""Both together, in the run's folder."""

CODE = "code"
"""The folder of the code that travelled with it, in the run's folder."""

ROOM = 64 * 2**20
RATIO = 20


class Folder(Protocol):
    """What is needed of a run's folder."""

    root: str

    def write(self, path: str, data: bytes | str) -> None: ...
    def delete(self, path: str) -> None: ...
    def file_names(self, path: str) -> list[str]: ...


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


def keep(
    folder: Folder, code_sha256: str | None, environment: Mapping[str, str] = os.environ
) -> None:
    """Put it into the run's folder, and remove the code of earlier ones. Where nothing was submitted, as on
    a laptop, none is left there."""
    for name in folder.file_names(f"{folder.root}/{CODE}"):
        if code_sha256 is None or f"{CODE}/{name}" != code_file(code_sha256):
            folder.delete(f"{folder.root}/{CODE}/{name}")
    path = f"{folder.root}/{FILE}"
    if VARIABLE not in environment:
        folder.delete(path)
        return
    submitted = {"config": json.loads(environment[CONFIG_VARIABLE])}
    submitted |= json.loads(environment[VARIABLE])
    folder.write(path, json.dumps(submitted, indent=2))
