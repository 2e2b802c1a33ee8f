"""Archives that nobody packs who means well, as a strategy of hypothesis, and what unpacking one may do."""

from __future__ import annotations

import io
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hypothesis import strategies as st

PLAIN = ("a", "b", "ä", "x" * 120)
HOSTILE = (*PLAIN, "..", "..", "", ".", "a\n", "a\0b", "\u202etxt", "\udcff", "x" * 300)
KINDS = (
    *(tarfile.REGTYPE,) * 16, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.GNUTYPE_SPARSE, tarfile.SYMTYPE,
    tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE,
)  # fmt: skip
HEADERS = (
    "path", "linkpath", "size", "hdrcharset", "GNU.sparse.size", "GNU.sparse.map", "GNU.sparse.major",
    "GNU.sparse.minor", "GNU.sparse.realsize", "GNU.sparse.name", "GNU.sparse.numblocks",
)  # fmt: skip
"""What a member may say a second time, and otherwise."""

DEPTH = 4
"""Parts of a name, and so how far it may lead up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A member of an archive."""

    name: str
    """One that begins with a slash counts from the place that `packed_from` is told."""
    kind: bytes
    link: str
    content: bytes
    headers: dict[str, str]


def _names(parts: tuple[str, ...]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(parts), min_size=1, max_size=DEPTH).map("/".join)


names = st.one_of(
    _names(PLAIN), _names(PLAIN), _names(PLAIN).map("/{}".format), _names(HOSTILE), _names(HOSTILE)
)
sayings = st.sampled_from(["1", "0,5", "q", "-1536", "9" * 30]) | names
entries = st.lists(
    st.builds(
        Entry,
        name=names,
        kind=st.sampled_from(KINDS),
        link=names,
        content=st.binary(max_size=3),
        headers=st.just({})
        | st.just({})
        | st.dictionaries(st.sampled_from(HEADERS), sayings, max_size=1),
    ),
    min_size=1,
    max_size=4,
)
damages = st.none() | st.none() | st.tuples(st.integers(0, 4000), st.integers(0, 255))
"""A byte that is another."""


def packed_from(entries: list[Entry], damage: tuple[int, int] | None, place: Path) -> bytes:
    """The tar of such members, of which none leads further than into the place."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            member = tarfile.TarInfo(_below(place, entry.name))
            member.type, member.linkname = entry.kind, _below(place, entry.link)
            member.pax_headers = {key: _below(place, text) for key, text in entry.headers.items()}
            member.size = len(entry.content) if member.isreg() else 0
            archive.addfile(member, io.BytesIO(entry.content))
    found = bytearray(stream.getvalue())
    if damage is not None:
        found[damage[0] % len(found)] = damage[1]
    return bytes(found)


def _below(place: Path, name: str) -> str:
    return f"{place}{name}" if name.startswith("/") else name


@contextmanager
def nothing_but_files_below(place: Path) -> Iterator[Path]:
    """A folder so deep in an empty place that no name leads out of that: what is unpacked into the folder is
    files and folders, and the rest of the place stays as it is."""
    folder = place.joinpath(*"1234", "folder")
    folder.mkdir(parents=True)
    for above in folder.parents[: DEPTH + 1]:
        (above / "b").write_text("not yours")
    before = _outside(place, folder)
    yield folder
    assert _outside(place, folder) == before
    for path in folder.rglob("*"):
        status = path.lstat()
        is_plain_file = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        assert is_plain_file or stat.S_ISDIR(status.st_mode)


def _outside(place: Path, folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {
        path: (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in place.rglob("*")
        if folder not in path.parents
    }


def files_of(archive: bytes) -> dict[PurePosixPath, bytes]:
    """The files that an archive tells of: of several with one name the last."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        found = [(member.name, members.extractfile(member)) for member in members]
        return {PurePosixPath(name): file.read() for name, file in found if file is not None}


def files_in(folder: Path) -> dict[PurePosixPath, bytes]:
    return {
        PurePosixPath(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
