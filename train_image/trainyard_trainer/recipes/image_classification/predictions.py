"""Validation images to look at, with what the model says of them. Only their rows are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from trainyard_trainer.checkpointing.files import load_tensors
from trainyard_trainer.config.training.models import Model
from trainyard_trainer.data.image_stream import ImageRows, ImageStream
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.data.sources.listing import explained_errors
from trainyard_trainer.data.stored_rows import read_validation
from trainyard_trainer.recipes.image_classification.model import build_model
from trainyard_trainer.recipes.image_classification.on_device import ToInput
from trainyard_trainer.run_folder.folder import RunFolder

NUM_PREDICTIONS = 9

STREAMED_LABELS = 256
"""The number of validation images of a stream among which those to look at are chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the delivered model says of one validation image."""

    pixels: np.ndarray
    """(C, H, W) uint8."""
    label: str
    predicted: str
    confidence: float


def predict(folder: RunFolder, model: Model, data: Prepared | ImageStream) -> list[Prediction]:
    """The delivered model's answers for a few validation images, of as many classes as there are."""
    labels = read_labels(data)
    rows = varied(labels.tolist(), NUM_PREDICTIONS)
    pixels = read_images(data, rows)
    network = build_model(model).eval()
    network.load_state_dict(load_tensors(folder, folder.model))
    with torch.inference_mode():
        to_input = ToInput(data.images, model.image_size, torch.device("cpu"))
        shares = network(to_input(torch.from_numpy(pixels))).softmax(dim=1)
    confidence, predicted = shares.max(dim=1)
    classes = data.images.classes
    return [
        Prediction(
            pixels=image,
            label=classes[labels[row]],
            predicted=classes[said],
            confidence=sure,
        )
        for row, image, said, sure in zip(
            rows, pixels, predicted.tolist(), confidence.tolist(), strict=True
        )
    ]


def find_mistakes(
    data: Prepared | ImageStream, worst: Sequence[dict[str, Any]]
) -> list[Prediction]:
    """The pictures that belong to what a validation calls its worst mistakes."""
    classes = data.images.classes
    pixels = read_images(data, [mistake["id"] for mistake in worst])
    return [
        Prediction(
            pixels=image,
            label=classes[mistake["label"]],
            predicted=classes[mistake["predicted"]],
            confidence=mistake["confidence"],
        )
        for image, mistake in zip(pixels, worst, strict=True)
    ]


def varied(labels: Iterable[int], count: int) -> list[int]:
    """Indices of the first of each class, then of the second of each, and so on."""
    seen: Counter[int] = Counter()
    rounds = []
    for index, label in enumerate(labels):
        rounds.append((seen[label], index))
        seen[label] += 1
    return [index for _, index in sorted(rounds)[:count]]


def read_images(data: Prepared | ImageStream, rows: Sequence[int]) -> np.ndarray:
    """Read the pixels of these validation images, (N, C, H, W) uint8."""
    if isinstance(data, ImageStream):
        return ImageRows(data, "valid")[np.asarray(rows, np.int64)]["image"].numpy()
    return read_validation(data, rows, "image")


def read_labels(data: Prepared | ImageStream) -> np.ndarray:
    """Read the labels of all validation images, or of the first ones of a stream, (N,) int64."""
    if isinstance(data, ImageStream):
        count = min(data.num_valid, STREAMED_LABELS)
        return ImageRows(data, "valid")[np.arange(count)]["label"].numpy()
    filesystem = data.open_filesystem()
    with explained_errors(data.path):
        tables = [
            pq.read_table(file, columns=["label"], filesystem=filesystem)
            for file in data.valid.files
        ]
    return pa.concat_tables(tables)["label"].to_numpy()
