"""Checkpoints that are there whole or not at all.

A checkpoint is a folder with `model.pt`, `state.pt`, at the end of an epoch `validation.json`, and,
written last, `manifest.json` with the size and SHA-256 of the others. Without its manifest it does not
exist; with one that does not fit, it is passed over. The names sort by progress, and no two writers use
the same one.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pickle import UnpicklingError
from typing import IO, Any, cast

from trainyard_trainer.config import checkpoint as wanted
from trainyard_trainer.config.section import Metric
from trainyard_trainer.errors import RunError
from trainyard_trainer.run_files.names import CHECKPOINT_MANIFEST, CheckpointName
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.progress import Trained

MODEL = "model.pt"
STATE = "state.pt"
VALIDATION = "validation.json"

Facts = dict[str, Any]
"""Size and SHA-256 of a file."""

Rule = wanted.CheckpointConfig | wanted.BoostingCheckpoint

FORMAT = 2
"""Of the manifest; other numbers are of other versions of this program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What a manifest says."""

    name: str
    trained: Trained
    config: dict[str, Any]
    """The whole TrainerConfig or BoostingConfig under which it was written."""
    images: dict[str, Any]
    """What the data's images, or the rows of a table, have in common, for whoever uses the model."""
    files: dict[str, dict[str, Any]]
    """Size and SHA-256 of each."""

    @property
    def bytes(self) -> int:
        return sum(facts["size"] for facts in self.files.values())


class Damaged(Exception):
    """A checkpoint that must not be used, and why."""


def load(folder: RunFolder, path: str, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Tensors and plain values of a file, on the CPU. No code of the file's is run.

    `known` has what is made for each of the classes, by their full names, that it may hold beside them.
    Raises RunError if it holds anything else: whoever can write into a run's folder could otherwise run
    programs as whoever reads it.
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
        written: Mapping[str, Facts] | None = None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> str:
        """Write a checkpoint and commit it, unless `before_commit` raises.

        `contents` is what goes into each file, `facts` what the manifest tells of config and images,
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

    def write(self, path: str, content: Any) -> Facts:
        """Write one file and return what its manifest says of it."""
        import torch  # takes seconds, which a list of checkpoints need not wait for

        with self.folder.writing(path) as stream:
            measured = Measured(stream.write)
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
        return measured.facts

    def read_manifest(self, name: str) -> Checkpoint:
        """What the manifest says. Raises Damaged, or RunError if another version wrote it."""
        try:
            manifest = json.loads(self.folder.read(self.path(name, CHECKPOINT_MANIFEST)))
            if manifest["format"] != FORMAT:
                raise RunError(
                    f"checkpoint {self.folder.show(self.path(name))} has format "
                    f"{manifest['format']}, this program reads {FORMAT}: "
                    "go on with the image that wrote it."
                )
            return Checkpoint(
                name=name,
                trained=Trained(**manifest["trained"]),
                config=manifest["config"],
                images=manifest["images"],
                files=dict(manifest["files"]),
            )
        except FileNotFoundError:
            raise Damaged("it was never committed: manifest.json is missing") from None
        except (ValueError, KeyError, TypeError):
            raise Damaged("its manifest.json cannot be read") from None

    def compare_sizes(self, checkpoint: Checkpoint) -> None:
        """Raises Damaged if a file is missing, or longer or shorter than the manifest says."""
        for file, known in checkpoint.files.items():
            size = self.folder.size(self.path(checkpoint.name, file))
            if size != known["size"]:
                found = "missing" if size is None else f"{size} bytes long"
                raise Damaged(f"{file} is {found}, its manifest says {known['size']} bytes")

    def check(self, name: str, read: Callable[[int], None] = lambda count: None) -> Checkpoint:
        """Read it all and compare; `read` hears of the bytes as they come.

        Raises Damaged, or RunError if another version wrote it.
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
    ) -> Checkpoint | None:
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

    def committed(self) -> list[Checkpoint]:
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
            else load(self.folder, path, known)
        )

    def delete(self, name: str) -> None:
        """The manifest goes first, so that half a removed checkpoint is none."""
        self.folder.delete(self.path(name, CHECKPOINT_MANIFEST))
        self.folder.delete(self.path(name))

    def prune(self, rule: Rule, newest: str) -> list[str]:
        """Remove what the rule does not keep, up to the newest; returns the names of what went.

        What lies there with a later name is of an older group that woke up once more: it takes no
        place of ours, and the next start removes it.
        """
        there = [
            checkpoint
            for checkpoint in self.committed()
            if CheckpointName.require(checkpoint.name) <= CheckpointName.require(newest)
        ]
        kept = kept_by(rule, there)
        gone = [checkpoint.name for checkpoint in there if checkpoint.name not in kept]
        for name in gone:
            self.delete(name)
        return gone


def kept_by(rule: Rule, newest_first: list[Checkpoint]) -> set[str]:
    """Names of the newest, of the best, and of one for each so many epochs."""
    kept = {checkpoint.name for checkpoint in newest_first[: rule.keep]}
    if best := best_of(newest_first, rule.best):
        kept.add(best.name)
    return kept | of_every(rule.keep_every_epochs, newest_first)


def of_every(epochs: int | None, newest_first: list[Checkpoint]) -> set[str]:
    """Names of one for each so many epochs."""
    return {
        checkpoint.name
        for checkpoint in _ends(newest_first)
        if epochs and checkpoint.trained.epoch % epochs == 0
    }


def best_of(newest_first: list[Checkpoint], metric: Metric) -> Checkpoint | None:
    """The one with the highest `val_accuracy` or the lowest `val_loss`; of equals the earliest."""
    return max(
        _ends(newest_first), key=lambda checkpoint: _worth(checkpoint.trained, metric), default=None
    )


def _worth(trained: Trained, metric: Metric) -> float:
    """The more the better; what is no number is the worst."""
    value = trained.val_accuracy if metric == "val_accuracy" else trained.val_loss
    if value is None or not math.isfinite(value):
        return -math.inf
    return value if metric == "val_accuracy" else -value


def _ends(newest_first: list[Checkpoint]) -> list[Checkpoint]:
    """Those at the end of an epoch, in order; an epoch that was trained twice counts by its newest."""
    ends = {
        checkpoint.trained.epoch: checkpoint
        for checkpoint in reversed(newest_first)
        if checkpoint.trained.steps_in_epoch == 0
    }
    return [ends[epoch] for epoch in sorted(ends)]


class Measured:
    """Counts and hashes what is written through it, so that no file is held in memory or read again."""

    def __init__(self, write: Callable[[bytes], Any]) -> None:
        self._write = write
        self.error: BaseException | None = None
        self.size = 0
        self.digest = hashlib.sha256()

    @property
    def facts(self) -> Facts:
        """Of what was written so far."""
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
        """torch calls it; the stream's owner closes the stream."""

    def close(self) -> None:
        """As `flush`."""
