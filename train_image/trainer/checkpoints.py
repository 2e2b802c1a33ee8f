"""The checkpoints of a run: list them, compare them with their manifests, clear them up.

python -m trainer.checkpoints ls|verify|prune RUN [--storage DIR] [--endpoint URL] ...
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

from pyarrow import fs

from trainer.checkpoint import MANIFEST, Checkpoint, Checkpoints, Damaged, best_of, of_every
from trainer.errors import RunError
from trainer.lease import refuse_if_live
from trainer.progress import Trained, read_lines
from trainer.resume import why_overtaken
from trainer.run_folder import RunFolder
from trainer.terminal import Arguments, Bar, add_run, exit_code_of, open_run, size_text, table_text

AGES = ((86_400, "d"), (3_600, "h"), (60, "min"))
"""Seconds of each unit in which an age is told."""


State = Literal["intact", "damaged", "overtaken", "uncommitted", "other version"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A checkpoint, and whether it can be used."""

    name: str
    state: State
    problem: str | None = None
    checkpoint: Checkpoint | None = None
    """What its manifest says, where that can be read."""


def judge(checkpoints: Checkpoints, name: str, *, is_thorough: bool) -> Judged:
    """By its manifest and the sizes of its files, or by all its bytes."""
    folder, checkpoint = checkpoints.folder, None
    try:
        checkpoint = checkpoints.read_manifest(name)
        if overtaken := why_overtaken(name, read_lines(folder, folder.starts)):
            return Judged(name=name, state="overtaken", problem=overtaken, checkpoint=checkpoint)
        checkpoints.compare_sizes(checkpoint)
        if is_thorough:
            with Bar(name, checkpoint.bytes) as bar:
                checkpoints.check(name, bar.advance)
    except Damaged as reason:
        state: State = "damaged" if checkpoints.is_committed(name) else "uncommitted"
        return Judged(name=name, state=state, problem=str(reason), checkpoint=checkpoint)
    except RunError as reason:
        return Judged(name=name, state="other version", problem=str(reason))
    return Judged(name=name, state="intact", checkpoint=checkpoint)


def newest_name(newest_first: list[Judged]) -> str | None:
    """The newest that is intact."""
    return next((each.name for each in newest_first if each.state == "intact"), None)


def best_name(newest_first: list[Judged]) -> str | None:
    """The best of the intact ones, by the rule of the newest one's config."""
    intact = [each.checkpoint for each in newest_first if each.state == "intact"]
    there = [checkpoint for checkpoint in intact if checkpoint]
    best = best_of(there, there[0].config["checkpoint"]["best"]) if there else None
    return best.name if best else None


def bytes_of(checkpoints: Checkpoints, name: str) -> int:
    """What it takes on the storage, committed or not."""
    selector = fs.FileSelector(checkpoints.path(name), recursive=True, allow_not_found=True)
    infos = checkpoints.folder.filesystem.get_file_info(selector)
    return sum(info.size for info in infos if info.type == fs.FileType.File)


# ls.


def ls(folder: RunFolder, *, as_json: bool) -> None:
    """Print all checkpoints, newest first."""
    checkpoints = Checkpoints(folder)
    judged = [judge(checkpoints, name, is_thorough=False) for name in checkpoints.names()]
    records = [record_of(checkpoints, each, marks_of(judged, each, folder)) for each in judged]
    if as_json:
        print(json.dumps(records, indent=2))
        return
    now = datetime.now(timezone.utc)
    print(
        table_text(
            [
                "checkpoint",
                "epoch",
                "step",
                "samples",
                "size",
                "age",
                "val_accuracy",
                "val_loss",
                "marks",
            ],
            [
                (
                    record["name"],
                    *(known(record[key], "d") for key in ("epoch", "step", "samples")),
                    size_text(record["bytes"]),
                    age_text(record["time"], now),
                    *(known(record[key], ".4f") for key in ("val_accuracy", "val_loss")),
                    ", ".join(record["marks"]),
                )
                for record in records
            ],
        )
    )
    for each in judged:
        if each.problem:
            print(f"{each.name}: {each.problem}", file=sys.stderr)


def marks_of(judged: list[Judged], one: Judged, folder: RunFolder) -> list[str]:
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


def record_of(checkpoints: Checkpoints, judged: Judged, marks: list[str]) -> dict[str, Any]:
    """What `ls --json` tells of one checkpoint."""
    time = checkpoints.folder.filesystem.get_file_info(
        checkpoints.path(judged.name, MANIFEST)
    ).mtime
    return {
        "name": judged.name,
        **result_of(judged.checkpoint.trained if judged.checkpoint else None),
        "bytes": bytes_of(checkpoints, judged.name),
        "time": time.astimezone(timezone.utc).isoformat(timespec="seconds") if time else None,
        "marks": marks,
        "problem": judged.problem,
    }


def result_of(trained: Trained | None) -> dict[str, Any]:
    """How far a checkpoint came, and what validation said of it."""
    # In mid-epoch the manifest repeats the last validation, which was of other weights.
    validated = trained if trained and trained.steps_in_epoch == 0 else None
    return {
        "epoch": trained.epoch if trained else None,
        "step": trained.step if trained else None,
        "samples": trained.samples if trained else None,
        "val_accuracy": validated.val_accuracy if validated else None,
        "val_loss": validated.val_loss if validated else None,
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


# verify.


def verify(folder: RunFolder, *, as_json: bool) -> None:
    """Read all, print what holds, and raise RunError if something does not."""
    checkpoints = Checkpoints(folder)
    judged = [judge(checkpoints, name, is_thorough=True) for name in checkpoints.names()]
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


# prune.


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


def going_of(
    checkpoints: Checkpoints, *, keep: int, keep_best: bool, every_epochs: int | None
) -> dict[str, str]:
    """Names to delete, the oldest first, each with its reason.

    What stays instead has been read and compared. Raises RunError if no checkpoint is intact.
    """
    kept: list[Judged] = []
    others: list[Judged] = []
    for name in checkpoints.names():
        judged = judge(checkpoints, name, is_thorough=len(kept) < keep)
        (kept if judged.state == "intact" and len(kept) < keep else others).append(judged)
    if not kept:
        raise RunError(
            f"no checkpoint of {checkpoints.folder.show(checkpoints.folder.root)} is intact: "
            "nothing is deleted."
        )
    if keep_best:
        others = _without_best(checkpoints, kept, others)
    intact = [each for each in (*kept, *others) if each.state == "intact"]
    milestones = of_every(every_epochs, [each.checkpoint for each in intact if each.checkpoint])
    newest = "the newest intact one" if keep == 1 else f"the newest {keep} intact ones"
    return {
        judged.name: judged.problem or f"older than {newest}"
        for judged in reversed(others)
        if judged.state != "other version" and judged.name not in milestones
    }


def _without_best(
    checkpoints: Checkpoints, kept: list[Judged], others: list[Judged]
) -> list[Judged]:
    """The others without the best of all, if that is among them and its bytes are right, too."""
    while best := best_name([*kept, *others]):
        if best in {judged.name for judged in kept}:
            break
        place = [judged.name for judged in others].index(best)
        others[place] = judge(checkpoints, others[place].name, is_thorough=True)
        if others[place].state == "intact":
            return others[:place] + others[place + 1 :]
    return others


# The command line.


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = Arguments(prog="python -m trainer.checkpoints")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("ls", "verify", "prune"):
        command = commands.add_parser(name)
        add_run(command)
        if name != "prune":
            command.add_argument("--json", action="store_true")
            continue
        command.add_argument("--keep", type=int, required=True)
        command.add_argument("--keep-best", action="store_true")
        command.add_argument("--keep-every-epochs", type=int)
        command.add_argument("--dry-run", action="store_true")
    wanted = parser.parse_args(arguments)
    if wanted.command == "prune" and wanted.keep < 1:
        parser.error("--keep must be at least 1: the newest intact checkpoint always stays")

    folder = open_run(wanted.run, wanted.storage, wanted.endpoint)
    if wanted.command == "ls":
        ls(folder, as_json=wanted.json)
    elif wanted.command == "verify":
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


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
