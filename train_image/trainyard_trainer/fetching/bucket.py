"""A folder or a file of a bucket as a source of files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pyarrow import fs

from trainyard_trainer.errors import ConfigError
from trainyard_trainer.fetching.source import RemoteFile, RemoteSource
from trainyard_trainer.storage import StorageFolder, open_filesystem


class BucketSource(RemoteSource):
    """A folder of a bucket. A file of the same size and time of change counts as the same.

    pyarrow lists no ETags. Those of large objects depend on the parts in which they were uploaded, so they
    would not tell more about the content than the time at which the object was put.
    """

    def __init__(self, address: str, endpoint: str | None, names: tuple[str, str]) -> None:
        """`names` are the keys of address and endpoint, for messages. Raises ConfigError."""
        filesystem, root = open_filesystem(address, endpoint, names=names)
        self.address = address
        self._folder = StorageFolder(filesystem, root, endpoint=endpoint)

    def identity(self, wanted: Sequence[str]) -> str:
        return repr((self.address, self._folder.endpoint, self.wanted_files(wanted)))

    def files(self) -> Sequence[RemoteFile]:
        return [
            RemoteFile(name=name, size=info.size, version=str(info.mtime_ns))
            for name, info in self._folder.tree().items()
        ]

    def download(self, file: RemoteFile, folder: Path) -> None:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as target:
            for chunk in self._folder.chunks(f"{self._folder.root}/{file.name}"):
                target.write(chunk)


class BucketFile(BucketSource):
    """A single file of a bucket: what lies beside it is not listed."""

    def __init__(self, address: str, endpoint: str | None, names: tuple[str, str]) -> None:
        """`names` are the keys of address and endpoint, for messages. Raises ConfigError."""
        folder, _, self.name = address.rpartition("/")
        super().__init__(folder, endpoint, names)
        self.address = address
        self._key = names[0]

    def files(self) -> Sequence[RemoteFile]:
        (info,) = self._folder.infos([f"{self._folder.root}/{self.name}"])
        if info.type != fs.FileType.File:
            found = "there is none" if info.type == fs.FileType.NotFound else "it is a folder"
            raise ConfigError(f"{self._key} = {self.address} has to be a file, and {found}")
        return [RemoteFile(name=self.name, size=info.size, version=str(info.mtime_ns))]
