"""Sharded checkpoints in DeepSpeed's own format, of which each worker writes its part.

The shards are in the folder `shards` of the checkpoint, which is the tag for DeepSpeed's tools. DeepSpeed's
engine gets a checkpoint engine that reads from and writes to the run's folder, and that does not execute
pickled code. Only the same number of workers can resume from such a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed

from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
)
from trainyard_trainer.checkpointing.files import FileEntry
from trainyard_trainer.checkpointing.shards import SHARDS, TrainingState, enum_member

FOREIGN = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
"""The classes of DeepSpeed that its files refer to. None of them is needed to read float32 weights."""

GETATTR = "builtins.getattr"
"""The function with which some versions of Python pickle members of an Enum. It is restricted to that use."""

ONE_FOR_ALL = f"{SHARDS}/mp_rank_00_model_states.pt"
"""The file with the whole model, for stages 1 and 2, in which each worker has all weights."""

OF_MODEL = f"{SHARDS}/zero_pp_rank_{{}}_mp_rank_00_model_states.pt"
"""The file of a worker with the state that is not sharded, for stage 3."""

OF_OPTIMIZER = f"{SHARDS}/zero_pp_rank_{{}}_mp_rank_00_optim_states.pt"
"""The file of a worker with its part of the weights and of the optimizer state."""


class ZeroShards:
    """The sharded checkpoints of a worker group that trains with DeepSpeed, with the methods of `Shards`."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        # Shards are saved during training, so they need a separate process group from that of the training.
        self._group = distributed.new_group(backend="gloo")

    def shares(self, learner: TrainingState) -> dict[str, Any]:
        """Return the content of this worker's files by path. The tensors are not copied."""
        contents: dict[str, Any] = {}

        def keep(content: Any, path: str) -> None:
            contents[f"{SHARDS}/{Path(path).name}"] = content

        engine = _engine(learner, save=keep)
        with TemporaryDirectory() as nowhere:
            engine.save_checkpoint(
                nowhere,
                tag=SHARDS,
                save_latest=False,
                exclude_frozen_parameters=not learner.saves_frozen_weights,
            )
        return contents

    def save(self, name: str, shares: Mapping[str, Any]) -> dict[str, FileEntry]:
        """Write this worker's files, and return the manifest's entries of all files. Raises StorageError."""
        checkpoints = self._checkpoints

        def write() -> dict[str, FileEntry]:
            return {
                file: checkpoints.write(checkpoints.path(name, file), content)
                for file, content in shares.items()
            }

        # Writing is retried if the storage fails. The other workers wait meanwhile.
        facts = checkpoints.folder.outlast(write)
        written: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(written, facts, group=self._group)
        return {file: each for of_one in written for file, each in of_one.items()}

    def load(self, name: str, learner: TrainingState) -> None:
        """Load a checkpoint into the engine. Raises RunError."""
        known = {path: _named(path) for path in FOREIGN} | {GETATTR: enum_member}

        def read(path: str) -> Any:
            return self._checkpoints.load(name, f"{SHARDS}/{Path(path).name}", known)

        engine = _engine(learner, load=read)
        with TemporaryDirectory() as folder:
            # The engine lists the files before it reads them.
            Path(folder, SHARDS).mkdir()
            for file in self._checkpoints.read_manifest(name).files:
                if file.startswith(f"{SHARDS}/"):
                    Path(folder, file).touch()
            engine.load_checkpoint(
                folder, tag=SHARDS, load_module_strict=learner.saves_frozen_weights
            )


def whole(checkpoints: Checkpoints, name: str) -> dict[str, torch.Tensor]:
    """Return the full weights of a checkpoint, loaded in one process without DeepSpeed. Raises RunError."""
    files = checkpoints.read_manifest(name).files
    known = {**dict.fromkeys(FOREIGN, _Foreign), GETATTR: _Foreign}
    if ONE_FOR_ALL in files:
        weights: dict[str, torch.Tensor] = checkpoints.load(name, ONE_FOR_ALL, known)["module"]
        return weights
    model = checkpoints.load(name, OF_MODEL.format(0), known)
    shares: list[Any] = []
    while (file := OF_OPTIMIZER.format(len(shares))) in files:
        optimizer = checkpoints.load(name, file, known)["optimizer_state_dict"]
        shares.append(torch.cat([group.flatten() for group in optimizer["fp32_flat_groups"]]))
    weights = {each: model["module"][each] for each in model["buffer_names"]}
    # Each weight is split into equal parts, one per worker; the last parts may be padded.
    begin = 0
    for each, shape in (pair for group in model["param_shapes"] for pair in group.items()):
        length = math.ceil(shape.numel() / len(shares))
        parts = [share[begin : begin + length] for share in shares]
        weights[each] = torch.cat(parts)[: shape.numel()].view(shape)
        begin += length
    return weights


class _Foreign:
    """A placeholder for objects that only DeepSpeed needs."""

    def __init__(self, *values: Any) -> None: ...


def _named(path: str) -> Any:
    """Import and return the class with a path such as `package.module.Class`."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _refuse(*_: Any) -> None:
    raise AssertionError("DeepSpeed called save instead of load, or load instead of save")


def _engine(
    learner: TrainingState,
    save: Callable[[Any, str], None] = _refuse,
    load: Callable[[str], Any] = _refuse,
) -> Any:
    """Return the learner's engine, with a checkpoint engine that calls the given functions."""
    from deepspeed.runtime.checkpoint_engine import checkpoint_engine

    class CallingEngine(checkpoint_engine.CheckpointEngine):  # type: ignore[misc]
        def create(self, info: Any) -> None: ...

        def save(self, state_dict: Any, path: str) -> None:
            save(state_dict, path)

        def load(self, path: str, map_location: Any = None) -> Any:
            return load(path)

        def commit(self, info: Any) -> bool:
            return True

    engine: Any = learner.wrapped
    engine.checkpoint_engine = CallingEngine()
    return engine
