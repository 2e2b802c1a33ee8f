"""Code that travels arrives as it was sent, and below its folder alone."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import random
import tarfile
from pathlib import Path

import pytest
from hypothesis import event, given

from tests.random_archives import (
    Entry,
    damages,
    entries,
    files_in,
    files_of,
    nothing_but_files_below,
    packed_from,
)
from trainyard_trainer.config.trainer_config import CODE_VARIABLE
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_files import submission
from trainyard_trainer.run_folder import code_archive as overlay
from trainyard_trainer.run_folder.folder import RunFolder


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
    overlay.unpack(archive, hashlib.sha256(archive).hexdigest(), folder, "the archive")


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
    with pytest.raises(ConfigError, match="is not a plain file in its folder"):
        unpack(packed((hostile, b"")), folder)
    assert [path.name for path in tmp_path.rglob("*")] == ["code"]


@given(entries=entries, damage=damages)
def test_whatever_an_archive_holds_files_below_the_folder_are_written_or_it_is_refused(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Entry], damage: tuple[int, int] | None
) -> None:
    place = tmp_path_factory.mktemp("place")
    archive = packed_from(entries, damage, place)
    with nothing_but_files_below(place) as folder:
        try:
            unpack(gzip.compress(archive), folder)
        except ConfigError:
            event("refused")
        else:
            event("unpacked")
            assert files_in(folder) == files_of(archive)


@pytest.mark.parametrize(
    ("header", "text", "problem"),
    [
        ("size", "-1536", "is not a plain file in its folder"),
        ("GNU.sparse.map", "0,1", "is not a plain file in its folder"),
        ("GNU.sparse.size", "many", "cannot be unpacked: invalid literal"),
        ("path", "a\0b", "cannot be unpacked: embedded null"),
    ],
)
def test_what_a_header_says_otherwise_is_refused(
    tmp_path: Path, header: str, text: str, problem: str
) -> None:
    strange = member("strange")
    strange.pax_headers = {header: text}
    with pytest.raises(ConfigError, match=problem):
        unpack(packed((strange, b"x")), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_bomb_is_refused_before_it_fills_the_disk(tmp_path: Path) -> None:
    zeros = bytes(submission.ROOM // 2)
    archive = packed((member("a"), zeros), (member("b"), zeros), (member("c"), b"x"))
    with pytest.raises(ConfigError, match="unpacks to more than 64 MiB"):
        unpack(archive, tmp_path)
    assert not (tmp_path / "c").exists()


def test_code_comes_from_a_variable_and_is_kept_or_was_uploaded(
    folder: RunFolder, tmp_path: Path
) -> None:
    archive = packed((member("main.py"), b"print()"))
    sha256 = hashlib.sha256(archive).hexdigest()
    sent = {CODE_VARIABLE: base64.b64encode(archive).decode()}
    for number, environment in enumerate((sent, {})):
        overlay.fetch(folder, sha256, tmp_path / f"{number}", environment)
        assert (tmp_path / f"{number}/main.py").read_bytes() == b"print()"
    assert folder.files() == [submission.code_file(sha256)]


@pytest.mark.parametrize(
    ("sent", "uploaded", "problem"),
    [
        ("%", b"", "TRAINYARD_CODE is not valid base64"),
        (
            base64.b64encode(b"other").decode(),
            b"",
            "TRAINYARD_CODE is not the archive .*SHA-256 differs",
        ),
        (None, b"other", r"code/\w+.tar.gz is not the archive .*SHA-256 differs"),
        (
            None,
            None,
            r"code/\w+.tar.gz, the archive of the run's code, does not exist. Submit the run again",
        ),
    ],
)
def test_what_was_not_sent_is_refused(
    tmp_path: Path, sent: str | None, uploaded: bytes | None, problem: str
) -> None:
    folder, sha256 = RunFolder.open(str(tmp_path), "own"), hashlib.sha256(b"sent").hexdigest()
    if uploaded is not None:
        folder.write(f"{folder.root}/{submission.code_file(sha256)}", uploaded)
    with pytest.raises(ConfigError, match=problem):
        overlay.fetch(
            folder, sha256, tmp_path / "to", {} if sent is None else {CODE_VARIABLE: sent}
        )
    assert not (tmp_path / "to").exists()


NOISE = packed((member("noise"), random.Random(0).randbytes(200_000)))


@pytest.mark.parametrize(
    "archive",
    [
        b"no archive",
        gzip.compress(b"no archive"),
        NOISE[:50_000],
        NOISE[:50_000] + b"\xff" * 50_000,
        b"",
    ],
    ids=["plain bytes", "compressed bytes", "half of one", "half a garbled one", "nothing"],
)
def test_what_is_no_archive_is_refused(tmp_path: Path, archive: bytes) -> None:
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        unpack(archive, tmp_path)
