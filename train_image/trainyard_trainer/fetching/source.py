"""A place outside of this machine whose files can be listed and fetched."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFile:
    """A file of a source."""

    name: str
    """Its path below the source's folder."""
    size: int
    """Its number of bytes."""
    version: str
    """What changes with its content: the time of its last change, or the hash that the hub has of it."""
    sha256: str | None = None
    """The SHA-256 of its content, where the source tells it."""


class RemoteSource(ABC):
    """A folder of files in a bucket, or at a commit of a model on the hub."""

    address: str
    """The address as a user would write it, for messages and as the name of what was fetched."""

    @abstractmethod
    def identity(self, wanted: Sequence[str]) -> str:
        """Return a text that differs if the content of the wanted files may differ."""

    @abstractmethod
    def files(self) -> Sequence[RemoteFile]:
        """Return all files as they are now. Raises ConfigError if there is no such place, and RunError."""

    @abstractmethod
    def download(self, file: RemoteFile, folder: Path) -> None:
        """Write a file below a folder of this machine, under its name. Raises TrainerError."""

    def wanted_files(self, wanted: Sequence[str]) -> list[RemoteFile]:
        """Return the files whose names match one of the patterns, in order of their names."""
        return sorted(
            (
                file
                for file in self.files()
                if any(fnmatchcase(file.name, pattern) for pattern in wanted)
            ),
            key=lambda file: file.name,
        )
