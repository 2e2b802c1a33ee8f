"""Checkpoints of which each worker writes its share: torch.distributed.checkpoint in a run's folder.

The shares lie in the checkpoint's folder `shards` as torch's own writer lays them out: `.metadata` says which
part of which tensor is in which file, so that any number of workers can read them. They hold tensors alone.
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


class TrainingState(Protocol):
    """What a sharded checkpoint reads of a worker's learner and restores into it, in place."""

    @property
    def network(self) -> nn.Module:
        """The model, sharded over the workers by FSDP2."""

    @property
    def wrapped(self) -> Any:
        """What the strategy made of the model; DeepSpeed's engine under `strategy: deepspeed`."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def average(self) -> nn.Module | None:
        """The moving average of the weights, where the run keeps one."""

    def sync_buffers(self) -> None:
        """Give the buffers of rank 0 to all workers."""


SHARDS = "shards"
"""The folder of a checkpoint in which they lie."""

METADATA = f"{SHARDS}/.metadata"

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
"""What torch's metadata of tensors is made of."""


class Shards:
    """The shares of one worker group's checkpoints; all of its workers do everything alike."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        # They are saved beside training, whose own exchanges must not get in between.
        self._group = distributed.new_group(backend="gloo")

    def shares(self, learner: TrainingState) -> dict[str, Any]:
        """This worker's part of weights, optimiser and average: training changes these very tensors.

        Buffers are whole on each worker, and any one of them writes them: they are rank 0's first.
        """
        learner.sync_buffers()
        return self._tensors(learner)

    def _tensors(self, learner: TrainingState) -> dict[str, Any]:
        network, optimizer, average = learner.network, learner.optimizer, learner.average
        return {
            "model": network.state_dict(),
            "optimizer": get_optimizer_state_dict(network, optimizer)["state"],
            "average": average.state_dict() if average else {},
        }

    def save(self, name: str, tensors: Mapping[str, Any]) -> dict[str, FileEntry]:
        """Write this worker's share; what the manifest is to say of all files. Raises OSError."""
        files = _Files(self._checkpoints.folder)
        writer = _Writer(files, self._checkpoints.path(name, SHARDS))
        try:
            dcp.save(dict(tensors), storage_writer=writer, process_group=self._group)
        except CheckpointException as error:
            raise _as_os_error(error) from error
        written: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(written, files.written, group=self._group)
        return {f"{SHARDS}/{file}": facts for each in written for file, facts in each.items()}

    def load(self, name: str, learner: TrainingState) -> None:
        """Fill its tensors, in place, with what was saved under their names. Raises OSError or RunError."""
        reader = _Reader(_Files(self._checkpoints.folder), self._checkpoints.path(name, SHARDS))
        try:
            dcp.load(self._tensors(learner), storage_reader=reader, process_group=self._group)
        except CheckpointException as error:
            raise _as_os_error(error) from error


def whole(checkpoints: Checkpoints, name: str, part: str) -> dict[str, torch.Tensor]:
    """The tensors of one part of a checkpoint, put together in one process. Raises RunError."""
    reader = _Reader(_Files(checkpoints.folder), checkpoints.path(name, SHARDS))
    known = reader.read_metadata().state_dict_metadata
    tensors = {}
    for path, each in known.items():
        if path.startswith(f"{part}."):
            assert isinstance(each, md.TensorStorageMetadata)
            tensors[path] = torch.empty(each.size, dtype=each.properties.dtype)
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {path.removeprefix(f"{part}."): tensor for path, tensor in tensors.items()}


def _as_os_error(error: CheckpointException) -> BaseException:
    """Of the first worker that failed; what is wrong with a checkpoint itself is no matter of storage."""
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, (OSError, RunError)):
        return type(cause)(f"worker {rank}: {cause}")
    return RuntimeError(f"worker {rank}: {type(cause).__name__}: {cause}")


class _Files(FileSystemBase):
    """A run's folder as torch's writer and reader see it."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.written: dict[str, FileEntry] = {}
        """Size and SHA-256 of each file, by its name."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode == "rb":
            # In one piece: tensor by tensor, a bucket would be asked thousands of times.
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
        """What is written brings its folder along."""

    def exists(self, path: Any) -> bool:
        return self.folder.exists(path)

    def rm_file(self, path: Any) -> None:
        self.folder.delete(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class _Writer(dcp.FileSystemWriter):
    def __init__(self, files: _Files, path: str) -> None:
        super().__init__(path, sync_files=False)  # our folder sees to that
        self.fs: Any = files
        self.path = path

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Each worker waits for a storage that refuses its share; the others wait for it."""
        write = super().write_data
        return self.fs.folder.outlast(lambda: write(plan, planner))


class _Reader(dcp.FileSystemReader):
    def __init__(self, files: _Files, path: str) -> None:
        super().__init__(path)
        self.fs: Any = files
        self.path = path

    def read_metadata(self, *args: Any, **kwargs: Any) -> md.Metadata:
        """Raises RunError if it holds anything but what is known of tensors: nothing of it is run."""
        path = self._get_metadata_path()
        try:
            with self.fs.create_stream(path, "rb") as stream:
                found: md.Metadata = _Unpickler(stream).load()
            _require_tensors(found)
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
            raise RunError(
                f"{self.fs.folder.show(path)} is no metadata of tensors: {error}\n"
                "       Nothing of it was run. It is damaged, or somebody else has written it."
            ) from None
        return found


class _Unpickler(pickle.Unpickler):
    """Makes nothing but what torch's metadata of tensors is made of."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        if name not in KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def enum_member(kind: Any, name: Any) -> Any:
    """A member of an Enum, which some Pythons, 3.11.2 among them, pickle as an attribute of its class.

    Raises UnpicklingError for any other attribute.
    """
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"it asks {kind!r} for {name!r}")


def _require_tensors(found: md.Metadata) -> None:
    """Other things than tensors would be unpickled by torch itself."""
    for path, each in found.state_dict_metadata.items():
        if not isinstance(each, md.TensorStorageMetadata):
            raise TypeError(f"{path} is no tensor")
    for index, place in found.storage_data.items():
        if "/" in place.relative_path:
            raise TypeError(f"{index.fqn} lies in {place.relative_path}")


def _name(path: str) -> str:
    return path.rpartition("/")[2]
