"""Unpack the user's code: an archive in an environment variable, or in the run's folder."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from trainyard_trainer.config.trainer_config import CODE_VARIABLE
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_files import submission
from trainyard_trainer.run_files.programs import code_imports
from trainyard_trainer.run_folder.folder import RunFolder


def fetch(
    folder: RunFolder, sha256: str, target: Path, environment: Mapping[str, str] = os.environ
) -> None:
    """Unpack a run's code into an empty folder, and store its archive in the run's folder.

    Raises ConfigError if the archive is missing or is not the one that was submitted.
    """
    read_and_unpack(folder, sha256, target, environment)
    store(folder, sha256, environment)


def store(folder: RunFolder, sha256: str, environment: Mapping[str, str] = os.environ) -> None:
    """Store a run's archive in the run's folder, where workers and `trainyard reproduce` find it."""
    if CODE_VARIABLE in environment:
        path = f"{folder.root}/{submission.code_file(sha256)}"
        folder.write(path, decode(environment[CODE_VARIABLE]))


def read_and_unpack(
    folder: RunFolder, sha256: str, target: Path, environment: Mapping[str, str]
) -> None:
    """Unpack a run's code into an empty folder, without a change of the run's folder."""
    if CODE_VARIABLE in environment:
        unpack(decode(environment[CODE_VARIABLE]), sha256, target, CODE_VARIABLE)
        return
    path = f"{folder.root}/{submission.code_file(sha256)}"
    try:
        archive = folder.read(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{folder.show(path)}, the archive of the run's code, does not exist. "
            "Submit the run again: that uploads it."
        ) from None
    unpack(archive, sha256, target, folder.show(path))


def make_importable(
    folder: RunFolder, sha256: str, environment: Mapping[str, str] = os.environ
) -> Path:
    """Unpack a run's code on this machine, unless it lies there already, and make its modules importable.

    Returns the folder of the code, which all processes of a machine share. The run's folder is not changed.
    Raises ConfigError as `fetch` does.
    """
    folders = Path(tempfile.gettempdir(), f"trainyard-code-{os.getuid()}")
    folders.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folders.stat().st_uid != os.getuid():
        raise ConfigError(f"{folders} belongs to another user. Set TMPDIR to a folder of your own.")
    target = folders / sha256
    with tempfile.TemporaryDirectory(dir=folders) as fresh:
        unpacked = Path(fresh, "code")
        unpacked.mkdir()
        read_and_unpack(folder, sha256, unpacked, environment)
        try:
            unpacked.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    code_imports.install([str(target)])
    return target


def decode(text: str) -> bytes:
    """Return the archive that an environment variable holds in base64. Raises ConfigError."""
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ConfigError(f"{CODE_VARIABLE} is not valid base64: {error}") from None


def unpack(archive: bytes, sha256: str, folder: Path, description: str) -> None:
    """Unpack an archive into an empty folder. Error messages call the archive `description`.

    Raises ConfigError if its SHA-256 differs, if it is damaged or too large, or if it holds anything but
    plain files.
    """
    if hashlib.sha256(archive).hexdigest() != sha256:
        raise ConfigError(f"{description} is not the archive that was submitted (SHA-256 differs)")
    limit_bytes = remaining_bytes = submission.unpacked_limit(len(archive))
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as members:
            for member in members:
                if not submission.is_plain_file(member):
                    raise ConfigError(
                        f"{description} contains {member.name!r}, which is not a plain file in its folder"
                    )
                remaining_bytes -= member.size
                if remaining_bytes < 0:
                    raise ConfigError(
                        f"{description} unpacks to more than {limit_bytes // 2**20} MiB"
                    )
                _unpack_file(members, member, folder)
    # ValueError: a header that holds no number, or a name with a NUL.
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError) as error:
        raise ConfigError(f"{description} cannot be unpacked: {error}") from None


def _unpack_file(members: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write one member of an archive below a folder, and keep whether it is executable."""
    source = members.extractfile(member)
    assert source is not None
    target = folder / member.name
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        shutil.copyfileobj(source, file)
    target.chmod(0o755 if member.mode & 0o100 else 0o644)
