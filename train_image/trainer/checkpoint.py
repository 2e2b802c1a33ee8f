"""Checkpoints that are there whole or not at all.

A checkpoint is a folder with `model.pt`, `state.pt` and, written last, `manifest.json` with the size and
SHA-256 of the others. Without its manifest it does not exist; with one that does not fit, it is passed
over. The names sort by progress and are never used for two different contents by two attempts.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from trainer.errors import RunError
from trainer.folder import RunFolder
from trainer.progress import Trained

MODEL = "model.pt"
STATE = "state.pt"
MANIFEST = "manifest.json"

FORMAT = 1
"""Of the manifest; other numbers are of other versions of this program."""

NAME = re.compile(r"s(\d{12})-a(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint whose files have been compared with its manifest."""

    name: str
    trained: Trained


class Damaged(Exception):
    """A checkpoint that must not be used, and why."""


class Checkpoints:
    """The checkpoints of a run's folder; one process at a time writes them."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def path(self, name: str, file: str = "") -> str:
        return f"{self.folder.checkpoints}/{name}/{file}".rstrip("/")

    def names(self) -> list[str]:
        """All there are, newest first, whole or not."""
        found = (NAME.fullmatch(name) for name in self.folder.subfolders(self.folder.checkpoints))
        matches = sorted(
            (match for match in found if match), key=lambda match: (int(match[1]), int(match[2]))
        )
        return [match[0] for match in reversed(matches)]

    def save(
        self,
        trained: Trained,
        *,
        attempt: int,
        keep: int,
        model: dict[str, Any],
        state: dict[str, Any],
        config: dict[str, Any],
    ) -> str:
        """Write a checkpoint, commit it, and remove all but the newest `keep`."""
        name = f"s{trained.samples:012d}-a{attempt}"
        # This attempt may have been here before a worker was lost.
        self.delete(name)
        files = {
            file: self._write(self.path(name, file), content)
            for file, content in ((MODEL, model), (STATE, state))
        }
        manifest = {"format": FORMAT, "files": files, "trained": asdict(trained), "config": config}
        self.folder.write(self.path(name, MANIFEST), json.dumps(manifest, indent=2))
        for old in self.names()[keep:]:
            self.delete(old)
        return name

    def _write(self, path: str, content: dict[str, Any]) -> dict[str, Any]:
        """Write one file and return what its manifest says of it."""
        with self.folder.writing(path) as stream:
            measured = _Measured(stream.write)
            try:
                torch.save(content, measured)
            except RuntimeError:
                # torch puts its own error before that of a full disk.
                if measured.error:
                    raise measured.error from None
                raise
        return {"size": measured.size, "sha256": measured.digest.hexdigest()}

    def check(self, name: str) -> Checkpoint:
        """Read it all and compare. Raises Damaged, or RunError if another version wrote it."""
        try:
            manifest = json.loads(self.folder.read(self.path(name, MANIFEST)))
            if manifest["format"] != FORMAT:
                raise RunError(
                    f"checkpoint {self.folder.show(self.path(name))} has format "
                    f"{manifest['format']}, this program reads {FORMAT}: "
                    "go on with the image that wrote it."
                )
            files: dict[str, Any] = manifest["files"]
            trained = Trained(**manifest["trained"])
        except FileNotFoundError:
            raise Damaged("it was never committed: manifest.json is missing") from None
        except (ValueError, KeyError, TypeError):
            raise Damaged("its manifest.json cannot be read") from None
        for file, wanted in files.items():
            path = self.path(name, file)
            size = self.folder.size(path)
            if size != wanted["size"]:
                found = "missing" if size is None else f"{size} bytes long"
                raise Damaged(f"{file} is {found}, its manifest says {wanted['size']} bytes")
            if self._sha256(path) != wanted["sha256"]:
                raise Damaged(f"{file} is not what was written: its SHA-256 differs")
        return Checkpoint(name=name, trained=trained)

    def _sha256(self, path: str) -> str:
        digest = hashlib.sha256()
        with self.folder.filesystem.open_input_stream(path) as stream:
            while chunk := stream.read(2**24):
                digest.update(chunk)
        return digest.hexdigest()

    def newest(self, say: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
        """The newest that is intact; `say` hears of each that is passed over."""
        for name in self.names():
            try:
                return self.check(name)
            except Damaged as reason:
                say(f"checkpoint {name} is passed over: {reason}")
        return None

    def is_committed(self, name: str) -> bool:
        return self.folder.exists(self.path(name, MANIFEST))

    def load(self, name: str, file: str) -> dict[str, Any]:
        """A file's content, on the CPU."""
        data = io.BytesIO(self.folder.read(self.path(name, file)))
        return torch.load(data, map_location="cpu", weights_only=True)

    def delete(self, name: str) -> None:
        """The manifest goes first, so that half a removed checkpoint is none."""
        self.folder.delete(self.path(name, MANIFEST))
        self.folder.delete(self.path(name))


class _Measured:
    """Counts and hashes what is written through it, so that no file is held in memory or read again."""

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self._write = write
        self.error: BaseException | None = None
        self.size = 0
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        length = memoryview(data).nbytes
        try:
            self._write(data)
        except BaseException as error:
            self.error = error
            raise
        self.size += length
        self.digest.update(data)
        return length

    def flush(self) -> None:
        """torch.save calls it; the stream's owner closes the stream."""
