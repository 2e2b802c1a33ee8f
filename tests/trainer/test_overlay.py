"""Code that travels arrives as it was sent, and below its folder alone."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from trainer import overlay
from trainer.errors import ConfigError


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, link
    return found


def unpack(archive: bytes, folder: Path) -> None:
    text, sha256 = base64.b64encode(archive).decode(), hashlib.sha256(archive).hexdigest()
    overlay.unpack(text, sha256, folder)


def test_files_arrive_with_their_contents_and_rights(tmp_path: Path) -> None:
    script = member("bin/run.sh")
    script.mode = 0o755
    unpack(packed((member("main.py"), b"print()"), (script, b"#!/bin/sh")), tmp_path)
    assert (tmp_path / "main.py").read_bytes() == b"print()"
    assert (tmp_path / "bin/run.sh").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    "hostile",
    [
        member("../out"),
        member("a/../../out"),
        member("/tmp/out"),
        member("link", tarfile.SYMTYPE, "/etc/passwd"),
        member("hard", tarfile.LNKTYPE, "main.py"),
        member("device", tarfile.CHRTYPE),
        member("pipe", tarfile.FIFOTYPE),
        member("folder", tarfile.DIRTYPE),
    ],
    ids=lambda member: member.name,
)
def test_what_is_no_file_below_the_folder_is_refused(
    tmp_path: Path, hostile: tarfile.TarInfo
) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    with pytest.raises(ConfigError, match="is no file below its folder"):
        unpack(packed((hostile, b"")), folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["code"]


def test_a_bomb_is_refused_before_it_fills_the_disk(tmp_path: Path) -> None:
    zeros = bytes(overlay.SIZE_LIMIT // 2)
    archive = packed((member("a"), zeros), (member("b"), zeros), (member("c"), b"x"))
    with pytest.raises(ConfigError, match="unpacks to more than 64 MiB"):
        unpack(archive, tmp_path)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [("%", "is no base64"), (base64.b64encode(b"other").decode(), "SHA-256 differs")],
)
def test_what_was_not_sent_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        overlay.unpack(text, hashlib.sha256(b"sent").hexdigest(), tmp_path)


@pytest.mark.parametrize("archive", [b"no archive", gzip.compress(b"no archive"), b""])
def test_what_is_no_archive_is_refused(tmp_path: Path, archive: bytes) -> None:
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        unpack(archive, tmp_path)
