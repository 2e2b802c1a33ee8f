"""The checkpoints of a run from the command line: list, verify and prune.

python -m trainyard_trainer.tools.checkpoints ls|verify|prune RUN [--storage DIR] [--endpoint URL] ...
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from typing import Any

from trainyard_trainer.checkpointing.checkpoint import (
    Checkpoints,
)
from trainyard_trainer.checkpointing.inventory import (
    CheckpointStatus,
    best_name,
    bytes_of,
    going_of,
    inspect_checkpoint,
    newest_name,
    result_of,
)
from trainyard_trainer.config.tools.checkpoint_tools import (
    CHECKPOINTS_LS,
    CHECKPOINTS_PRUNE,
    CHECKPOINTS_VERIFY,
)
from trainyard_trainer.config.training.metric import is_validation
from trainyard_trainer.errors import RunError
from trainyard_trainer.run_files.names import CHECKPOINT_MANIFEST
from trainyard_trainer.run_files.programs.standard_streams import run_with_safe_streams
from trainyard_trainer.run_files.sizes import size_text
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.ownership.lease import refuse_if_live
from trainyard_trainer.terminal import table_text
from trainyard_trainer.tools.command_line import exit_code_of, open_run, parse

AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))
"""Seconds of each unit in which an age is told."""


def ls(folder: RunFolder, *, as_json: bool) -> None:
    """Print all checkpoints, newest first."""
    checkpoints = Checkpoints(folder)
    judged = [
        inspect_checkpoint(checkpoints, name, is_thorough=False) for name in checkpoints.names()
    ]
    records = [record_of(checkpoints, each, marks_of(judged, each, folder)) for each in judged]
    if as_json:
        print(json.dumps(records, indent=2))
        return
    now = datetime.now(timezone.utc)
    metrics = list(dict.fromkeys(name for each in records for name in each if is_validation(name)))
    print(
        table_text(
            [
                "checkpoint",
                "epoch",
                "step",
                "samples",
                "size",
                "age",
                *metrics,
                "marks",
            ],
            [
                (
                    record["name"],
                    *(known(record[key], "d") for key in ("epoch", "step", "samples")),
                    size_text(record["bytes"]),
                    age_text(record["time"], now),
                    *(known(record.get(name), ".4f") for name in metrics),
                    ", ".join(record["marks"]),
                )
                for record in records
            ],
        )
    )
    for each in judged:
        if each.problem:
            print(f"{each.name}: {each.problem}", file=sys.stderr)


def marks_of(judged: list[CheckpointStatus], one: CheckpointStatus, folder: RunFolder) -> list[str]:
    marked = (
        ("newest", newest_name(judged)),
        ("best", best_name(judged)),
        ("delivered", delivered_name(folder)),
    )
    return [mark for mark, name in marked if name == one.name] + (
        [] if one.state == "intact" else [one.state]
    )


def delivered_name(folder: RunFolder) -> str | None:
    """The checkpoint whose weights are the run's model.pt."""
    if not folder.exists(folder.model_facts):
        return None
    name: str = json.loads(folder.read(folder.model_facts))["checkpoint"]
    return name


def record_of(
    checkpoints: Checkpoints, judged: CheckpointStatus, marks: list[str]
) -> dict[str, Any]:
    """Return the fields of one checkpoint in the output of `ls --json`."""
    manifest = checkpoints.path(judged.name, CHECKPOINT_MANIFEST)
    time = checkpoints.folder.infos([manifest])[0].mtime
    return {
        "name": judged.name,
        **result_of(judged.checkpoint.trained if judged.checkpoint else None),
        "bytes": bytes_of(checkpoints, judged.name),
        "time": time.astimezone(timezone.utc).isoformat(timespec="seconds") if time else None,
        "marks": marks,
        "problem": judged.problem,
    }


def known(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def age_text(time: str | None, now: datetime) -> str:
    """`5 min`, `3 h`: in the largest unit that counts."""
    if time is None:
        return "-"
    seconds = int((now - datetime.fromisoformat(time)).total_seconds())
    size, unit = next((each for each in AGES if seconds >= each[0]), (1, "s"))
    return f"{max(seconds, 0) // size} {unit}"


def verify(folder: RunFolder, *, as_json: bool) -> None:
    """Read all, print what holds, and raise RunError if something does not."""
    checkpoints = Checkpoints(folder)
    judged = [
        inspect_checkpoint(checkpoints, name, is_thorough=True) for name in checkpoints.names()
    ]
    if as_json:
        keys = ("name", "state", "problem")
        print(json.dumps([{key: getattr(each, key) for key in keys} for each in judged], indent=2))
    else:
        rows = [(each.name, each.state, each.problem or "") for each in judged]
        print(table_text(("checkpoint", "state", "why"), rows))
    damaged = [each.name for each in judged if each.state == "damaged"]
    if damaged:
        raise RunError(
            f"damaged in {folder.show(folder.checkpoints)}: {', '.join(damaged)}\n"
            "       A run passes over them; `trainyard checkpoints prune` deletes them."
        )


def prune(
    folder: RunFolder, *, keep: int, keep_best: bool, every_epochs: int | None, is_dry: bool
) -> None:
    """Delete what is not kept, and print it."""
    refuse_if_live(folder, _say)
    checkpoints = Checkpoints(folder)
    going = going_of(checkpoints, keep=keep, keep_best=keep_best, every_epochs=every_epochs)
    freed = 0
    for name, reason in going.items():
        size = bytes_of(checkpoints, name)
        if not is_dry:
            checkpoints.delete(name)
        freed += size
        print(f"{'would delete' if is_dry else 'deleted'} {name}, {size_text(size)}: {reason}")
    print(
        f"{len(going)} checkpoint{'' if len(going) == 1 else 's'}, {size_text(freed)} "
        f"{'would be ' if is_dry else ''}freed"
    )


def main(arguments: list[str] | None = None) -> int:
    tool, wanted = parse(arguments, CHECKPOINTS_LS, CHECKPOINTS_VERIFY, CHECKPOINTS_PRUNE)
    folder = open_run(wanted.run, wanted.storage, wanted.endpoint)
    if tool is CHECKPOINTS_LS:
        ls(folder, as_json=wanted.json)
    elif tool is CHECKPOINTS_VERIFY:
        verify(folder, as_json=wanted.json)
    else:
        prune(
            folder,
            keep=wanted.keep,
            keep_best=wanted.keep_best,
            every_epochs=wanted.keep_every_epochs,
            is_dry=wanted.dry_run,
        )
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_with_safe_streams(lambda: exit_code_of(main)))
