"""Checkpoints that are there whole or not at all.

A checkpoint is a folder with `model.pt`, `state.pt`, at the end of an epoch `validation.json`, and,
written last, `manifest.json` with the size and SHA-256 of the others. Without its manifest it does not
exist; with one that does not fit, it is passed over. The names sort by progress, and no two writers use
the same one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import IO, Any, cast

from trainyard_trainer.checkpointing.files import FileEntry, HashingWriter, load_tensors
from trainyard_trainer.config.training.metric import ValidationGoal
from trainyard_trainer.errors import RunError
from trainyard_trainer.run_files.names import CHECKPOINT_MANIFEST, CheckpointName
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import Trained

MODEL = "model.pt"
STATE = "state.pt"
VALIDATION = "validation.json"

FORMAT = 4
"""Of the manifest; other numbers are of other versions of this program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCheckpoint:
    """A checkpoint as its manifest describes it: progress, config and files."""

    name: str
    trained: Trained
    config: dict[str, Any]
    """The whole TrainerConfig or BoostingConfig under which it was written."""
    data: dict[str, Any]
    """What the samples of the data set, or the rows of a table, have in common, for users of the model."""
    goal: ValidationGoal
    """What the best checkpoint of the run is chosen by."""
    files: dict[str, dict[str, Any]]
    """Size and SHA-256 of each."""

    @property
    def bytes(self) -> int:
        return sum(facts["size"] for facts in self.files.values())


class Damaged(Exception):
    """A checkpoint that must not be used, and why."""


class OtherVersion(RunError):
    """A checkpoint in the format of another version of this program."""


class Checkpoints:
    """The checkpoints of a run's folder; one process at a time writes them."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def path(self, name: str, file: str = "") -> str:
        return f"{self.folder.checkpoints}/{name}/{file}".rstrip("/")

    def names(self) -> list[str]:
        """All there are, newest first, whole or not."""
        found = map(CheckpointName.parse, self.folder.subfolders(self.folder.checkpoints))
        return [str(name) for name in sorted(filter(None, found), reverse=True)]

    def save(
        self,
        trained: Trained,
        *,
        attempt: int,
        group: int,
        contents: Mapping[str, Any],
        facts: Mapping[str, Any],
        written: Mapping[str, FileEntry] | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> str:
        """Write a checkpoint and commit it, unless `before_commit` raises.

        `contents` is what goes into each file, `facts` what the manifest tells of config and data,
        `written` what it tells of files that lie there already.
        """
        name = str(CheckpointName(trained.samples, attempt, group))
        files = {
            file: self.write(self.path(name, file), content) for file, content in contents.items()
        } | dict(written or {})
        manifest = {"format": FORMAT, "files": files, "trained": asdict(trained), **facts}
        before_commit()
        self.folder.write(self.path(name, CHECKPOINT_MANIFEST), json.dumps(manifest, indent=2))
        return name

    def write(self, path: str, content: Any) -> FileEntry:
        """Write one file and return what its manifest says of it."""
        import torch  # takes seconds, which a list of checkpoints need not wait for

        with self.folder.writing(path) as stream:
            measured = HashingWriter(stream.write)
            if path.endswith(".json"):
                measured.write(json.dumps(content).encode())
            elif isinstance(content, bytes):
                measured.write(content)
            else:
                try:
                    torch.save(content, cast(IO[bytes], measured))
                except RuntimeError:
                    # torch puts its own error before that of a full disk.
                    if measured.error:
                        raise measured.error from None
                    raise
        return measured.entry

    def read_manifest(self, name: str) -> SavedCheckpoint:
        """What the manifest says. Raises Damaged, or OtherVersion."""
        try:
            manifest = json.loads(self.folder.read(self.path(name, CHECKPOINT_MANIFEST)))
            if manifest["format"] != FORMAT:
                raise OtherVersion(
                    f"checkpoint {self.folder.show(self.path(name))} has format "
                    f"{manifest['format']}, this program reads {FORMAT}: "
                    "go on with the version of trainyard that wrote it."
                )
            return SavedCheckpoint(
                name=name,
                trained=Trained(**manifest["trained"]),
                config=manifest["config"],
                data=manifest["data"],
                goal=ValidationGoal(**manifest["goal"]),
                files=dict(manifest["files"]),
            )
        except FileNotFoundError:
            raise Damaged("it was never committed: manifest.json is missing") from None
        except (ValueError, KeyError, TypeError):
            raise Damaged("its manifest.json cannot be read") from None

    def compare_sizes(self, checkpoint: SavedCheckpoint) -> None:
        """Raises Damaged if a file is missing, or longer or shorter than the manifest says."""
        for file, known in checkpoint.files.items():
            size = self.folder.size(self.path(checkpoint.name, file))
            if size != known["size"]:
                found = "missing" if size is None else f"{size} bytes long"
                raise Damaged(f"{file} is {found}, its manifest says {known['size']} bytes")

    def check(self, name: str, read: Callable[[int], None] = lambda count: None) -> SavedCheckpoint:
        """Read it all and compare; `read` hears of the bytes as they come.

        Raises Damaged, or OtherVersion.
        """
        checkpoint = self.read_manifest(name)
        self.compare_sizes(checkpoint)
        for file, known in checkpoint.files.items():
            if self.folder.sha256(self.path(name, file), read) != known["sha256"]:
                raise Damaged(f"{file} is not what was written: its SHA-256 differs")
        return checkpoint

    def newest(
        self,
        say: Callable[[str], None] = lambda line: None,
        why_not: Callable[[str], str | None] = lambda name: None,
    ) -> SavedCheckpoint | None:
        """The newest that is intact, and against which nothing speaks; `say` hears of each other."""
        for name in self.names():
            if reason := why_not(name):
                say(f"checkpoint {name} is passed over: {reason}")
                continue
            try:
                return self.check(name)
            except Damaged as damage:
                say(f"checkpoint {name} is passed over: {damage}")
        return None

    def committed(self) -> list[SavedCheckpoint]:
        """Those with a readable manifest, newest first; their files are not compared."""
        found = []
        for name in self.names():
            try:
                found.append(self.read_manifest(name))
            except Damaged:
                continue
        return found

    def is_committed(self, name: str) -> bool:
        return self.folder.exists(self.path(name, CHECKPOINT_MANIFEST))

    def load(self, name: str, file: str, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A file's content; tensors on the CPU. One of bytes is for `folder.read`. `known` as for `load`."""
        path = self.path(name, file)
        return (
            json.loads(self.folder.read(path))
            if file.endswith(".json")
            else load_tensors(self.folder, path, known)
        )

    def delete(self, name: str) -> None:
        """The manifest goes first, so that half a removed checkpoint is none."""
        self.folder.delete(self.path(name, CHECKPOINT_MANIFEST))
        self.folder.delete(self.path(name))
