"""Sharded checkpoints, of which each worker writes its part, with torch.distributed.checkpoint (DCP).

The shards are in the folder `shards` of the checkpoint, in DCP's format: `.metadata` maps the parts of each
tensor to files. Any number of workers can therefore load them. Shards contain only tensors.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, Protocol

import torch
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
)
from trainyard_trainer.checkpointing.files import FileEntry, HashingWriter
from trainyard_trainer.errors import RunError
from trainyard_trainer.run_folder.folder import RunFolder


class AveragedNetwork(Protocol):
    """The moving average of the weights of a network."""

    @property
    def network(self) -> nn.Module:
        """A network of the same shape, sharded in the same way, with the averaged weights and buffers."""


class TrainingState(Protocol):
    """The state of a worker that a sharded checkpoint saves, and restores in place."""

    @property
    def network(self) -> nn.Module:
        """The model, sharded over the workers by FSDP2."""

    @property
    def wrapped(self) -> Any:
        """The model as the strategy has wrapped it: DeepSpeed's engine with `strategy: deepspeed`."""

    @property
    def saves_frozen_weights(self) -> bool:
        """Whether a checkpoint holds the weights that are not trained."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers, each of which trains a part of the model or all of it."""

    @property
    def average(self) -> AveragedNetwork | None:
        """The moving average of the weights; None if the run has none."""

    def sync_buffers(self) -> None:
        """Copy the buffers of rank 0 to all workers."""

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights of the model that a checkpoint holds. They are not copied."""


SHARDS = "shards"
"""The name of the folder with the shards, in the folder of a checkpoint."""

METADATA = f"{SHARDS}/.metadata"
"""The path of DCP's metadata file in the folder of a checkpoint."""

KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        *("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
        *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        "Size",
        "bfloat16",
        "bool",
        "float16",
        "float32",
        "float64",
        "int32",
        "int64",
        "strided",
    },
}
"""The names, by module, that a pickled metadata file of tensors may refer to."""


class Shards:
    """The sharded checkpoints of a worker group. All workers must call the same methods in the same order."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        # Shards are saved during training, so they need a separate process group from that of the training.
        self._group = distributed.new_group(backend="gloo")

    def shares(self, learner: TrainingState) -> dict[str, Any]:
        """Return this worker's part of the weights, optimizer state and average. The tensors are not copied.

        Buffers are replicated on all workers, and DCP lets one of them write them. They are therefore
        copied from rank 0 first.
        """
        learner.sync_buffers()
        return self._tensors(learner)

    def _tensors(self, learner: TrainingState) -> dict[str, Any]:
        network, average = learner.network, learner.average
        return {
            "model": learner.weights(),
            "optimizer": get_optimizer_state_dict(network, learner.optimizers)["state"],
            "average": average.network.state_dict() if average else {},
        }

    def save(self, name: str, tensors: Mapping[str, Any]) -> dict[str, FileEntry]:
        """Write this worker's shard, and return the manifest's entries of all files. Raises StorageError."""
        files = _Files(self._checkpoints.folder)
        writer = _Writer(files, self._checkpoints.path(name, SHARDS))
        try:
            dcp.save(dict(tensors), storage_writer=writer, process_group=self._group)
        except CheckpointException as error:
            raise _cause_of(error) from error
        written: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(written, files.written, group=self._group)
        return {f"{SHARDS}/{file}": facts for each in written for file, facts in each.items()}

    def load(self, name: str, learner: TrainingState) -> None:
        """Load a checkpoint into the learner's tensors, in place. Raises RunError."""
        reader = _Reader(_Files(self._checkpoints.folder), self._checkpoints.path(name, SHARDS))
        try:
            dcp.load(self._tensors(learner), storage_reader=reader, process_group=self._group)
        except CheckpointException as error:
            raise _cause_of(error) from error


def whole(checkpoints: Checkpoints, name: str, part: str) -> dict[str, torch.Tensor]:
    """Return the full tensors of one part of a checkpoint, loaded in one process. Raises RunError."""
    reader = _Reader(_Files(checkpoints.folder), checkpoints.path(name, SHARDS))
    known = reader.read_metadata().state_dict_metadata
    tensors = {}
    for path, each in known.items():
        if path.startswith(f"{part}."):
            assert isinstance(each, md.TensorStorageMetadata)
            tensors[path] = torch.empty(each.size, dtype=each.properties.dtype)
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {path.removeprefix(f"{part}."): tensor for path, tensor in tensors.items()}


def _cause_of(error: CheckpointException) -> BaseException:
    """Return the error of the failed worker with the lowest rank, with its rank if it is unexpected."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, RunError):
        return cause
    return RuntimeError(f"worker {rank}: {type(cause).__name__}: {cause}")


class _Files(FileSystemBase):
    """An adapter that gives DCP's writer and reader access to the run's folder."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.written: dict[str, FileEntry] = {}
        """The size and SHA-256 of each written file, by its name."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode == "rb":
            # Read the whole file at once: one request per tensor would be thousands of requests to a bucket.
            yield io.BytesIO(self.folder.read(path))
            return
        with self.folder.writing(path) as stream:
            measured = HashingWriter(stream.write)
            yield measured
        self.written[_name(path)] = measured.entry

    def concat_path(self, path: Any, suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: Any) -> str:
        return str(path)

    def rename(self, path: Any, new_path: Any) -> None:
        self.folder.move(path, new_path)
        self.written[_name(new_path)] = self.written.pop(_name(path))

    def mkdir(self, path: Any) -> None:
        """Do nothing: writing a file creates its folder."""

    def exists(self, path: Any) -> bool:
        return self.folder.exists(path)

    def rm_file(self, path: Any) -> None:
        self.folder.delete(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _Writer(dcp.FileSystemWriter):
    def __init__(self, files: _Files, path: str) -> None:
        super().__init__(path, sync_files=False)  # RunFolder syncs files
        self.fs: Any = files
        self.path = path

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Write this worker's data, with retries if the storage fails. The other workers wait meanwhile."""
        write = super().write_data
        return self.fs.folder.outlast(lambda: write(plan, planner))


class _Reader(dcp.FileSystemReader):
    def __init__(self, files: _Files, path: str) -> None:
        super().__init__(path)
        self.fs: Any = files
        self.path = path

    def read_metadata(self, *args: Any, **kwargs: Any) -> md.Metadata:
        """Read the metadata without executing code. Raises RunError if it describes more than tensors."""
        path = self._get_metadata_path()
        try:
            with self.fs.create_stream(path, "rb") as stream:
                found: md.Metadata = _Unpickler(stream).load()
            _require_tensors(found)
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
            raise RunError(
                f"{self.fs.folder.show(path)} is not a metadata file of tensors: {error}\n"
                "       It is damaged, or it was not written by this program. No code from it was executed."
            ) from None
        return found


class _Unpickler(pickle.Unpickler):
    """An unpickler that accepts only the classes of DCP's metadata of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        if name not in KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module, name)


def enum_member(kind: Any, name: Any) -> Any:
    """Return a member of an Enum. Some versions of Python, such as 3.11.2, pickle members as `getattr` calls.

    Raises UnpicklingError for any other attribute.
    """
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"it gets the attribute {name!r} of {kind!r}")


def _require_tensors(found: md.Metadata) -> None:
    """Raise TypeError if the metadata describes other objects than tensors: torch would unpickle them."""
    for path, each in found.state_dict_metadata.items():
        if not isinstance(each, md.TensorStorageMetadata):
            raise TypeError(f"{path} is not a tensor")
    for index, place in found.storage_data.items():
        if "/" in place.relative_path:
            raise TypeError(f"{index.fqn} is in {place.relative_path}, outside of the folder")


def _name(path: str) -> str:
    return path.rpartition("/")[2]
