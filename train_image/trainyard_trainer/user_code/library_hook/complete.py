"""Find the complete checkpoints of a library: a process may have been killed while it saved one."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

INCOMPLETE = "checkpoint-is-incomplete.txt"
"""The file in a checkpoint that Transformers has begun, but not finished, to write after SIGTERM."""

WEIGHTS = (
    "model.safetensors",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "adapter_model.bin",
)
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SHARDED_WEIGHTS = "pytorch_model_fsdp_0"
SHARDED_OPTIMIZER = "optimizer_0"


def newest_transformers_checkpoint(folder: str, world_size: int) -> tuple[str | None, bool]:
    """Return the newest complete checkpoint of an output folder, and whether it has any checkpoint at all."""
    found: list[tuple[int, Path]] = []
    for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
        step = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if step is not None and path.is_dir():
            found.append((int(step[1]), path))
    for _, path in sorted(found, reverse=True):
        if is_complete_transformers_checkpoint(path, world_size):
            return str(path), True
    return None, bool(found)


def is_complete_transformers_checkpoint(checkpoint: Path, world_size: int) -> bool:
    """Return whether a checkpoint of Transformers' Trainer has all the files that resuming needs."""
    ranks = (
        ["rng_state.pth"] if world_size == 1 else [f"rng_state_{r}.pth" for r in range(world_size)]
    )
    if (checkpoint / INCOMPLETE).exists() or not _is_json(checkpoint / "trainer_state.json"):
        return False
    if not all(_is_zip(checkpoint / name) for name in ranks):
        return False
    if (checkpoint / "latest").is_file():
        return _is_complete_deepspeed_checkpoint(checkpoint, world_size)
    return (
        _is_zip(checkpoint / "scheduler.pt")
        and _has_optimizer(checkpoint)
        and _has_weights(checkpoint)
    )


def newest_lightning_checkpoint(folders: Iterable[str]) -> str | None:
    """Return the newest complete checkpoint of Lightning below some folders. A sharded one is a folder."""
    found = {path for folder in folders for path in Path(folder).rglob("*.ckpt")}
    complete = [path for path in found if (_is_dcp(path) if path.is_dir() else _is_zip(path))]
    return str(max(complete, key=_saved_at)) if complete else None


def _saved_at(path: Path) -> int:
    return (path / ".metadata" if path.is_dir() else path).stat().st_mtime_ns


def _has_optimizer(checkpoint: Path) -> bool:
    is_sharded = (checkpoint / SHARDED_OPTIMIZER).is_dir()
    if is_sharded:
        return _is_dcp(checkpoint / SHARDED_OPTIMIZER)
    return any(_is_zip(checkpoint / name) for name in ("optimizer.pt", "optimizer.bin"))


def _has_weights(checkpoint: Path) -> bool:
    if (checkpoint / SHARDED_WEIGHTS).is_dir():
        return _is_dcp(checkpoint / SHARDED_WEIGHTS)
    for index in INDEXES:
        if (checkpoint / index).is_file():
            parts = _parts_of(checkpoint / index)
            return bool(parts) and all(_is_weights(checkpoint / part) for part in parts)
    names = [name for name in WEIGHTS if (checkpoint / name).exists()]
    return bool(names) and all(_is_weights(checkpoint / name) for name in names)


def _is_complete_deepspeed_checkpoint(checkpoint: Path, world_size: int) -> bool:
    """Return whether a checkpoint of DeepSpeed has all its files, given that the file `latest` exists.

    DeepSpeed writes `latest` last. Each worker has a file of optimizer states, unless nothing is sharded.
    """
    tag = checkpoint / (checkpoint / "latest").read_text().strip()
    states = list(tag.glob("*.pt"))
    optimizers = [path for path in states if path.name.endswith("_optim_states.pt")]
    models = [path for path in states if path.name.endswith("_model_states.pt")]
    return bool(models) and len(optimizers) in (0, world_size) and all(map(_is_zip, states))


def _is_dcp(folder: Path) -> bool:
    """Return whether a checkpoint of torch.distributed.checkpoint is complete: `.metadata` is written
    last."""
    return (folder / ".metadata").is_file() and any(folder.glob("*.distcp"))


def _is_weights(file: Path) -> bool:
    return _is_safetensors(file) if file.suffix == ".safetensors" else _is_zip(file)


def _is_zip(file: Path) -> bool:
    """Return whether a file of `torch.save` is complete: the directory of the zip archive is at its end."""
    return file.is_file() and zipfile.is_zipfile(file)


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_text())
    except (OSError, ValueError):
        return False
    return True


def _parts_of(index: Path) -> set[str]:
    if not _is_json(index):
        return set()
    return set(json.loads(index.read_text())["weight_map"].values())


def _is_safetensors(file: Path) -> bool:
    """Return whether a safetensors file is complete.

    Its header has the offsets of all tensors, and the file ends with the last tensor.
    """
    if not file.is_file() or file.stat().st_size < 8:
        return False
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            return False
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            return False
    ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    return file.stat().st_size == 8 + length + max(ends, default=0)
