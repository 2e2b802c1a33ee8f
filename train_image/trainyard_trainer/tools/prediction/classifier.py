"""Label images with a saved model. The images are prepared in the same way as for validation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trainyard_trainer.config.training.recipes import recipe_named
from trainyard_trainer.data.image_codec import UnreadableError, load
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.image_classification.on_device import ToInput
from trainyard_trainer.recipes.saved_model import Saved
from trainyard_trainer.terminal import Bar

SHOWN_PROBLEMS = 20
"""The largest number of unusable files that an error message lists."""

INPUT_OF_RECIPE = {
    "image_classification": "images: trainyard predict RUN IMAGE...",
    "language_model": "text: trainyard predict RUN --prompt TEXT",
    "causal_lm": "text: trainyard predict RUN --prompt TEXT, --chat, or FILE --out ANSWERS",
}
"""What the models of each recipe take as input, for an error message."""

TopLabels = tuple[tuple[str, float], ...]
"""Labels with their confidence, most likely first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledFile:
    """An image file with the labels that the model gives to it."""

    file: str
    top: TopLabels
    pixels: np.ndarray
    """(C, H, W) uint8, in the shape of the model's training data."""


class Classifier:
    """A saved image model on a device. Raises ConfigError for a model of text."""

    def __init__(self, saved: Saved, device: torch.device) -> None:
        require_recipe(saved, "image_classification")
        self.info = saved.info
        self._network = saved.build().to(device)
        self._to_input = ToInput(self.info, saved.config.image_size, device)
        self._device = device

    def __call__(self, pixels_NCHW: np.ndarray, top: int) -> list[TopLabels]:
        """Return the `top` most likely labels of each image; pixels are uint8."""
        classes = self.info.classes
        with torch.inference_mode():
            pixels = torch.from_numpy(pixels_NCHW).to(self._device)
            shares = self._network(self._to_input(pixels)).softmax(dim=1)
            best = shares.topk(min(top, len(classes)), dim=1)
        return [
            tuple(
                (classes[label], round(confidence, 6))
                for label, confidence in zip(labels, confidences, strict=True)
            )
            for labels, confidences in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


def classify_files(
    saved: Saved, files: Sequence[str], *, top: int, batch_size: int, device: torch.device
) -> list[LabelledFile]:
    """Return the labels of image files, in the order of the files.

    Raises ConfigError with all files that cannot be used, and for a model of text.
    """
    classifier = Classifier(saved, device)
    labelled: list[LabelledFile] = []
    problems: list[str] = []
    with Bar("images", len(files)) as bar:
        for names, loaded in _batches(files, classifier.info.shape, batch_size):
            bar.advance(len(names))
            problems += [each for each in loaded if isinstance(each, str)]
            if problems:  # Go on, to find all other files that cannot be used.
                continue
            pixels_NCHW = np.stack(loaded)
            labelled += [
                LabelledFile(file=file, pixels=pixels, top=top_labels)
                for file, pixels, top_labels in zip(
                    names, pixels_NCHW, classifier(pixels_NCHW, top), strict=True
                )
            ]
    if problems:
        more = len(problems) - SHOWN_PROBLEMS
        raise ConfigError(
            f"{len(problems)} of {len(files)} files cannot be used:"
            + "".join(f"\n       {problem}" for problem in problems[:SHOWN_PROBLEMS])
            + (f"\n       and {more} more" if more > 0 else "")
        )
    return labelled


def require_recipe(saved: Saved, recipe: str) -> None:
    """Raise ConfigError if the model is of another recipe."""
    found = recipe_named(saved.facts)
    if found != recipe:
        takes = INPUT_OF_RECIPE.get(
            found, "samples: trainyard predict RUN --trust-code with --split valid or --data PATH"
        )
        raise ConfigError(
            f"{saved.facts['run']} is a run of train.recipe = {found}, which takes {takes}."
        )


def _batches(
    files: Sequence[str], shape: tuple[int, int, int], batch_size: int
) -> Iterator[tuple[Sequence[str], list[np.ndarray | str]]]:
    """Yield file names with their pixels, or with the reason why a file cannot be used.

    The next batch is read while the caller computes this one.
    """

    def read(file: str) -> np.ndarray | str:
        try:
            return load(Path(file).read_bytes(), shape)
        except OSError as error:
            return f"{file}: {error.strerror}"
        except UnreadableError as reason:
            return f"{file}: {reason}"

    batches = [files[start : start + batch_size] for start in range(0, len(files), batch_size)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        pending = threads.map(read, batches[0])
        for names, following in zip(batches, [*batches[1:], []], strict=True):
            loaded, pending = list(pending), threads.map(read, following)
            yield names, loaded
