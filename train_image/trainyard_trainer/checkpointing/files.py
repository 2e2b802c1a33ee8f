"""The files of a checkpoint: written with a hash, and loaded without running code from them."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from pickle import UnpicklingError
from typing import Any

from trainyard_trainer.errors import RunError
from trainyard_trainer.run_folder.folder import RunFolder

FileEntry = dict[str, Any]
"""What a manifest says of a file: its `size` in bytes and its `sha256`."""


def load_tensors(
    folder: RunFolder, path: str, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Load tensors and plain values from a file to the CPU, without running code from the file.

    `known` maps the full names of further classes that the file may hold to what is made in their place.
    Raises RunError if the file holds anything else. Otherwise anyone who can write to the run's folder could
    run programs with the rights of its readers.
    """
    import torch  # takes seconds, which a list of checkpoints need not wait for

    data = io.BytesIO(folder.read(path))
    classes: list[Any] = [(made, name) for name, made in (known or {}).items()]
    try:
        with torch.serialization.safe_globals(classes):
            return torch.load(data, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else "it is empty"
        raise RunError(
            f"{folder.show(path)} holds no weights that may be loaded: {reason}\n"
            "       Nothing of it was run. It is damaged, or somebody else has written it."
        ) from None


class HashingWriter:
    """Measures the size and SHA-256 of a file while it is written."""

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self._write = write
        self.error: BaseException | None = None
        self.size = 0
        self.digest = hashlib.sha256()

    @property
    def entry(self) -> FileEntry:
        """The manifest's entry for what was written so far."""
        return {"size": self.size, "sha256": self.digest.hexdigest()}

    def tell(self) -> int:
        return self.size

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
        """Do nothing: torch calls it, and the owner of the stream flushes it."""

    def close(self) -> None:
        """Do nothing: torch calls it, and the owner of the stream closes it."""
