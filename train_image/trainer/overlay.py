"""The code that travels with a run: an archive in an environment variable -> a folder of this machine."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import tarfile
from pathlib import Path, PurePosixPath

from trainer.config import CODE_VARIABLE
from trainer.errors import ConfigError

SIZE_LIMIT = 64 * 2**20
"""Bytes that an archive may unpack to: what fits into a variable and unpacks to more is no code."""


def unpack(text: str, sha256: str, folder: Path) -> None:
    """Unpack the archive into an empty folder. Raises ConfigError where it is not what was sent."""
    try:
        archive = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ConfigError(f"{CODE_VARIABLE} is no base64: {error}") from None
    if hashlib.sha256(archive).hexdigest() != sha256:
        raise ConfigError(
            f"{CODE_VARIABLE} is not the archive that was submitted (SHA-256 differs)"
        )
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as members:
            room = SIZE_LIMIT
            for member in members:
                room -= member.size
                if room < 0:
                    raise ConfigError(
                        f"{CODE_VARIABLE} unpacks to more than {SIZE_LIMIT // 2**20} MiB"
                    )
                _unpack_file(members, member, folder)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigError(f"{CODE_VARIABLE} cannot be unpacked: {error}") from None


def _unpack_file(members: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Files alone, and below the folder alone: nothing else is ever packed."""
    path = PurePosixPath(member.name)
    if not member.isreg() or path.is_absolute() or ".." in path.parts:
        raise ConfigError(f"{CODE_VARIABLE} holds {member.name}, which is no file below its folder")
    source = members.extractfile(member)
    assert source is not None
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read())
    target.chmod(0o755 if member.mode & 0o100 else 0o644)
