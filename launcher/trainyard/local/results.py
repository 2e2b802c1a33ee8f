"""The result of a run, read from its folder: metrics, checkpoints and the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from trainyard.errors import ConfigError, RunFailed
from trainyard.local.tools import NEEDED, require_packages
from trainyard_trainer.run_files.names import (
    CHECKPOINTS,
    CODE,
    METRICS,
    MODEL,
    MODEL_METADATA,
    RAY_SNAPSHOT,
    SUMMARY,
    checkpoint_of_manifest,
)

Object = dict[str, Any]


class Files(Protocol):
    """The methods of a run's folder that a result needs; see `RemoteFolder`."""

    def files(self) -> list[str]: ...
    def read(self, file: str) -> str | None: ...
    def records(self, file: str) -> list[Object]: ...
    def copy(self, path: str, target: Path) -> list[Path]: ...


OpenFiles = Callable[[], AbstractContextManager[Files]]
"""A function that opens a run's folder."""


class LocalFiles:
    """A run's folder on this machine, with the methods of `RemoteFolder` that a result needs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def files(self) -> list[str]:
        """Return the paths of all files in the folder."""
        return sorted(
            str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()
        )

    def read(self, file: str) -> str | None:
        """Return the text of a file, or None if it does not exist."""
        try:
            return (self.root / file).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None

    def records(self, file: str) -> list[Object]:
        """Return the records of a file with one JSON object per line. Incomplete lines are skipped."""
        records: list[Object] = []
        for line in (self.read(file) or "").splitlines():
            with suppress(ValueError):
                records.append(json.loads(line))
        return records

    def copy(self, path: str, target: Path) -> list[Path]:
        """Copy a file, a folder or the whole run, and return the paths of the copies.

        Raises ConfigError if the path does not exist.
        """
        place = self.root / path
        if place.is_file():
            places = {target / place.name if target.is_dir() else target: place}
        else:
            inside = [found for found in sorted(place.rglob("*")) if found.is_file()]
            places = {target / found.relative_to(place): found for found in inside}
        if not places:
            raise ConfigError(f"run {self.root.name} has no {path or 'folder'} in {self.root}")
        for written, source in places.items():
            written.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, written)
        return list(places)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptCheckpoint:
    """A checkpoint in the folder of a run."""

    name: str
    path: str
    """The folder of the checkpoint, relative to the run's folder; `Result.download` takes it."""
    step: int | None
    """The number of optimizer steps before the checkpoint; None for user code."""
    metrics: Object
    """The metrics that were reported with the checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelPrediction:
    """The labels that a model predicts for one image."""

    label: str
    confidence: float
    top: tuple[tuple[str, float], ...]
    """The labels with their confidence, the most likely one first."""


@dataclass(frozen=True, kw_only=True)  # without slots, for cached_property
class Result:
    """The result of a run that has succeeded. Names from Ray Train's `Result` have the same meaning."""

    run: str
    path: str
    """The path of the run's folder, on this machine or in the pods of the cluster."""
    summary: Object
    """The content of summary.json."""
    records: tuple[Object, ...]
    """The records of metrics.jsonl, of all attempts."""
    best_checkpoint: KeptCheckpoint | None
    """The best checkpoint by `checkpoint.best`; None for user code."""
    last_checkpoint: KeptCheckpoint | None
    """The newest checkpoint; None if the run has none."""
    open_files: OpenFiles = field(repr=False)

    @property
    def metrics(self) -> Object:
        """The last reported metrics; for a recipe, those of its last epoch. Empty if there are none."""
        reported = [record for record in self.records if record.get("kind") != "interval"]
        return _metrics_of(reported[-1]) if reported else {}

    @property
    def metrics_dataframe(self) -> Any:
        """All reported metrics as a pandas DataFrame. Rows with `kind` "epoch" are at the end of an epoch.

        Raises ConfigError if pandas is not installed; `records` does not need it.
        """
        require_packages(["pandas"], "a data frame")
        rows = [{**_metrics_of(each), "attempt": each.get("attempt")} for each in self.records]
        return import_module("pandas").DataFrame(rows)

    def download(self, target: str | Path, path: str | None = None) -> list[Path]:
        """Copy a file or folder of the run, by default its model, and return the paths of the copies.

        A copy from a cluster is checked by SHA-256. Raises ConfigError if the run has no such path.
        """
        with self.open_files() as files:
            return files.copy(self._model_file if path is None else path.strip("/"), Path(target))

    def model(self, *, trust_code: bool = False) -> Any:
        """Return the trained network as a torch module, ready for inference.

        `model.json` describes its input. `predict` prepares images accordingly. The network of a recipe of
        your own is built by the code in the run's folder: `trust_code` runs it. Raises LauncherError.
        """
        with _explained():
            return (self._trusted if trust_code else self._saved).build()

    def predict(
        self, images: Sequence[Any], *, top: int = 1, batch_size: int = 64
    ) -> list[LabelPrediction]:
        """Return the predicted labels of images, in their order. Images are prepared as for validation.

        An image is the path of an image file, or a uint8 array (H, W) or (H, W, C) with 1 or 3 channels.
        Raises ConfigError with all images that cannot be used, or if torch is not installed.
        """
        if isinstance(images, str | PathLike):
            raise ConfigError(f"images = {images}: must be a list", f"Use predict(['{images}']).")
        if not len(images):
            return []
        with TemporaryDirectory() as scratch, _explained():
            saved = self._saved
            files = [_file_of(image, number, Path(scratch)) for number, image in enumerate(images)]
            torch = import_module("torch")
            answers = _trainer("tools.prediction.classifier").classify_files(
                saved,
                files,
                top=top,
                batch_size=batch_size,
                device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
            )
        return [
            LabelPrediction(label=answer.top[0][0], confidence=answer.top[0][1], top=answer.top)
            for answer in answers
        ]

    @property
    def _model_file(self) -> str:
        """The name of the model's file: `model.pt`, or the file of the library for gradient_boosting."""
        return Path(self.summary.get("model", MODEL)).name

    @cached_property
    def _saved(self) -> Any:
        """The model, read from a copy of its files by `trainyard_trainer.recipes.saved_model`."""
        return self._read_saved(trust_code=False)

    @cached_property
    def _trusted(self) -> Any:
        """The same model, whose recipe may be run if it is the user's."""
        return self._read_saved(trust_code=True)

    def _read_saved(self, *, trust_code: bool) -> Any:
        if self._model_file != MODEL:
            raise ConfigError(
                f"the model of run {self.run} is not a network, but a file of trees: {self._model_file}",
                "Use download() to copy the file, and load it with XGBoost or LightGBM.",
            )
        require_packages([*NEEDED, "obstore"], "a model")
        with TemporaryDirectory() as scratch, self.open_files() as files:
            names = [MODEL, MODEL_METADATA]
            if trust_code:
                names += [name for name in files.files() if name.startswith(f"{CODE}/")]
            for name in names:
                files.copy(name, Path(scratch) / self.run / name)
            folder = _trainer("run_folder.folder").RunFolder.open(scratch, self.run)
            read_saved = _trainer("recipes.saved_model").read_saved
            return read_saved(folder, "delivered", trusts_code=trust_code)


def read_result(run: str, path: str, open_files: OpenFiles) -> Result:
    """Read the result of a run. Raises RunFailed if summary.json does not show that it has succeeded."""
    with open_files() as files:
        summary = json.loads(files.read(SUMMARY) or "{}")
        if summary.get("outcome") != "succeeded":
            raise RunFailed(
                f"run {run} has no result in {path}",
                "Its folder was removed, or the run is being trained again: wait for its end.",
            )
        records, names = files.records(METRICS), files.files()
        snapshot = files.read(RAY_SNAPSHOT) if RAY_SNAPSHOT in names else None
    ends = {record["epoch"]: record for record in records if record.get("kind") == "epoch"}
    last = _of_epoch(ends.get(summary.get("epochs")), names)
    return Result(
        run=run,
        path=path,
        summary=summary,
        records=tuple(records),
        best_checkpoint=_of_epoch(ends.get(summary.get("best_epoch")), names),
        last_checkpoint=_of_ray_train(snapshot) if snapshot else last,
        open_files=open_files,
    )


def _metrics_of(record: Object) -> Object:
    """Return the metrics of a record; user code has them under the key `metrics`."""
    metrics: Object = record.get("metrics", record)
    return metrics


def _of_epoch(record: Object | None, names: Sequence[str]) -> KeptCheckpoint | None:
    """Return the checkpoint at the end of an epoch, the newest one if the epoch was trained twice."""
    if record is None:
        return None
    complete = [name for name in map(checkpoint_of_manifest, names) if name is not None]
    of_epoch = [name for name in complete if name.samples == record["samples"]]
    if not of_epoch:
        return None
    name = str(max(of_epoch, key=lambda name: (name.attempt, name.group)))
    return KeptCheckpoint(
        name=name, path=f"{CHECKPOINTS}/{name}", step=record["step"], metrics=_metrics_of(record)
    )


def _of_ray_train(snapshot: str) -> KeptCheckpoint | None:
    """Return the newest checkpoint of user code, from Ray Train's snapshot."""
    latest = json.loads(snapshot).get("latest_checkpoint_result")
    if latest is None:
        return None
    name = latest["checkpoint_dir_name"]
    return KeptCheckpoint(name=name, path=name, step=None, metrics=latest["metrics"])


def _file_of(image: Any, number: int, scratch: Path) -> str:
    """Return the path of an image file. An array is written to a file first. Raises ConfigError."""
    if isinstance(image, str | PathLike):
        return str(image)
    kind, shape = str(getattr(image, "dtype", "")), tuple(getattr(image, "shape", ()))
    if kind != "uint8" or not (len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))):
        found = f"{kind} {shape}" if kind else type(image).__name__
        raise ConfigError(
            f"image {number} has an unsupported type: {found}",
            "Use the path of an image file, or a uint8 array (H, W) or (H, W, C) with 1 or 3 channels.",
        )
    pixels_CHW = image[None] if len(shape) == 2 else image.transpose(2, 0, 1)
    file = scratch / f"{number}.png"
    file.write_bytes(_trainer("data.image_codec").to_png(pixels_CHW))
    return str(file)


def _trainer(module: str) -> Any:
    """Import a module of the trainer on demand, because submitting a run does not need torch."""
    return import_module(f"trainyard_trainer.{module}")


@contextmanager
def _explained() -> Iterator[None]:
    """Translate errors of the trainer inside the block into errors of the launcher."""
    trainer_error = _trainer("errors").TrainerError
    try:
        yield
    except trainer_error as error:
        what, *details = str(error).splitlines()
        kind = ConfigError if error.exit_code == ConfigError.exit_code else RunFailed
        raise kind(what, *map(str.strip, details)) from error
