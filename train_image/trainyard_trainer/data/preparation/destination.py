"""The destination of a preparation: what it may hold already, and the state of an unfinished preparation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainyard_trainer.data.preparation.context import PrepareContext
from trainyard_trainer.data.prepared import DATASET, read_dataset_json
from trainyard_trainer.data.sources.lance_datasets import split_version
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import ASIDE

STATE = ".prepare"
"""The folder of the destination that holds the state of an unfinished preparation."""


def state_path(dest: RunFolder, name: str) -> str:
    """Return the path of a file of the preparation's state."""
    return f"{dest.root}/{STATE}/{name}"


def is_finished(dest: RunFolder, options: Mapping[str, Any]) -> bool:
    """Whether the destination holds this data set already. Raises ConfigError if it holds something else."""
    if dest.exists(f"{dest.root}/{DATASET}"):
        _refuse_others(dest, read_dataset_json(dest)["options"], options)
        clear_state(dest)
        return True
    if not dest.exists(state_path(dest, "plan.json")) and any(
        not file.endswith(ASIDE) for file in dest.files()
    ):
        raise ConfigError(
            f"{dest.show(dest.root)} has files that are not part of a data set. Use a new or an empty folder."
        )
    return False


def refuse_nested(dest: RunFolder, sources: Sequence[str | None]) -> None:
    """Raise ConfigError if the destination is inside one of the sources."""
    path = dest.show(dest.root)
    for source in sources:
        if source is not None and f"{path}/".startswith(f"{split_version(source)[0]}/"):
            raise ConfigError(
                f"{path} is inside {source}: its files would be read as part of the source. Use a folder "
                "beside it."
            )


def _refuse_others(dest: RunFolder, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    different = [key for key in wanted if found.get(key) != wanted[key]]
    if different:
        lines = "".join(
            f"\n       {key}: {found.get(key)} there, {wanted[key]} here" for key in different
        )
        raise ConfigError(
            f"{dest.show(dest.root)} holds another data set, or the beginning of another one:{lines}\n"
            "       Use another destination, or delete that data set."
        )


def settle_plan(
    dest: RunFolder,
    options: Mapping[str, Any],
    stamps: Mapping[str, str],
    make: Callable[[], Mapping[str, Any]],
    context: PrepareContext,
) -> Mapping[str, Any]:
    """Return the plan of an interrupted preparation as JSON, or make and write a new one.

    `stamps` are fingerprints of the files of each source. If these have changed since, for example because a
    picture was repaired, the preparation begins again: nothing has been trained on what it has written.
    Raises ConfigError if the interrupted preparation had other options, unless the destination belongs to
    this preparation alone.
    """
    path = state_path(dest, "plan.json")
    wanted = {**options, **stamps}
    if dest.exists(path):
        found = json.loads(dest.read(path))
        if not context.owns_destination:
            _refuse_others(dest, found["options"], options)
        if all(found["options"].get(key) == value for key, value in wanted.items()):
            known: Mapping[str, Any] = found["plan"]
            return known
        context.say(
            f"{dest.show(dest.root)}: the source or the options have changed since a preparation was "
            "interrupted, so it begins again"
        )
        for name in dest.subfolders(dest.root):
            dest.delete(f"{dest.root}/{name}")
    plan = make()
    dest.write(path, json.dumps({"options": wanted, "plan": plan}, indent=1))
    return plan


def write_file(dest: RunFolder, file: str, data: bytes, rows: int) -> dict[str, Any]:
    """Write a Parquet file of the data set, and return its entry in dataset.json."""
    dest.write(f"{dest.root}/{file}", data)
    sha256 = hashlib.sha256(data).hexdigest()
    return {"file": file, "rows": rows, "bytes": len(data), "sha256": sha256}


def clear_state(dest: RunFolder) -> None:
    """Remove the files that only an unfinished preparation needs."""
    dest.delete(f"{dest.root}/{STATE}")
    if dest.is_local:
        dest.sweep()
