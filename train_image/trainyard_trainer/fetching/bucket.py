"""A folder of a bucket as a source of files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
