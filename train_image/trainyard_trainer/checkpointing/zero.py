"""Checkpoints of DeepSpeed's own format, of which each worker writes its share, in a run's folder.

They lie in the checkpoint's folder `shards`, which is a tag for DeepSpeed's tools. Its engine is given what
says `save` and `load` in place of its own, so that they go where the run's folder is, and nothing in them is
run. Only as many workers as have written them can go on from them.
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
"""Classes of DeepSpeed's in its files, none of which matters to weights in float32."""

GETATTR = "builtins.getattr"
"""What some Pythons pickle the member of an Enum with; nothing else is got by it."""

ONE_FOR_ALL = f"{SHARDS}/mp_rank_00_model_states.pt"
"""Of stages 1 and 2: all weights, which each worker has."""

OF_MODEL = f"{SHARDS}/zero_pp_rank_{{}}_mp_rank_00_model_states.pt"
"""Of stage 3: what is not shared out."""

OF_OPTIMIZER = f"{SHARDS}/zero_pp_rank_{{}}_mp_rank_00_optim_states.pt"
"""Of each worker, from 0: its weights, and what the optimiser knows of them."""


class ZeroShards:
    """As `Shards`, of DeepSpeed's engine."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        # They are saved beside training, whose own exchanges must not get in between.
        self._group = distributed.new_group(backend="gloo")

    def shares(self, learner: TrainingState) -> dict[str, Any]:
        """What this worker is to save, by file; training changes these very tensors."""
        contents: dict[str, Any] = {}

        def keep(content: Any, path: str) -> None:
            contents[f"{SHARDS}/{Path(path).name}"] = content

        engine = _engine(learner, save=keep)
        with TemporaryDirectory() as nowhere:
            engine.save_checkpoint(nowhere, tag=SHARDS, save_latest=False)
        return contents

    def save(self, name: str, shares: Mapping[str, Any]) -> dict[str, FileEntry]:
        """Write this worker's share; what the manifest is to say of all files. Raises OSError."""
        checkpoints = self._checkpoints

        def write() -> dict[str, FileEntry]:
            return {
                file: checkpoints.write(checkpoints.path(name, file), content)
                for file, content in shares.items()
            }

        # Each worker waits for a storage that refuses its share; the others wait for it.
        facts = checkpoints.folder.outlast(write)
        written: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.all_gather_object(written, facts, group=self._group)
        return {file: each for of_one in written for file, each in of_one.items()}

    def load(self, name: str, learner: TrainingState) -> None:
        """Go on from what was saved. Raises OSError or RunError."""
        known = {path: _named(path) for path in FOREIGN} | {GETATTR: enum_member}

        def read(path: str) -> Any:
            return self._checkpoints.load(name, f"{SHARDS}/{Path(path).name}", known)

        engine = _engine(learner, load=read)
        with TemporaryDirectory() as folder:
            # The engine looks which files there are before it has them read.
            Path(folder, SHARDS).mkdir()
            for file in self._checkpoints.read_manifest(name).files:
                if file.startswith(f"{SHARDS}/"):
                    Path(folder, file).touch()
            engine.load_checkpoint(folder, tag=SHARDS)


def whole(checkpoints: Checkpoints, name: str) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, put together in one process without DeepSpeed. Raises RunError."""
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
    # Each weight was cut into equal parts, one for each worker; the last ones may be filled up.
    begin = 0
    for each, shape in (pair for group in model["param_shapes"] for pair in group.items()):
        length = math.ceil(shape.numel() / len(shares))
        parts = [share[begin : begin + length] for share in shares]
        weights[each] = torch.cat(parts)[: shape.numel()].view(shape)
        begin += length
    return weights


class _Foreign:
    """Stands for what only DeepSpeed has a use for."""

    def __init__(self, *values: Any) -> None: ...


def _named(path: str) -> Any:
    """Import the class that a path such as `package.module.Class` names."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _refuse(*_: Any) -> None:
    raise AssertionError("DeepSpeed saves where it should load, or loads where it should save")


def _engine(
    learner: TrainingState,
    save: Callable[[Any, str], None] = _refuse,
    load: Callable[[str], Any] = _refuse,
) -> Any:
    """The learner's engine, with these in place of its own `torch.save` and `torch.load`."""
    from deepspeed.runtime.checkpoint_engine import checkpoint_engine

    class Given(checkpoint_engine.CheckpointEngine):  # type: ignore[misc]
        def create(self, info: Any) -> None: ...

        def save(self, state_dict: Any, path: str) -> None:
            save(state_dict, path)

        def load(self, path: str, map_location: Any = None) -> Any:
            return load(path)

        def commit(self, info: Any) -> bool:
            return True

    engine: Any = learner.wrapped
    engine.checkpoint_engine = Given()
    return engine
