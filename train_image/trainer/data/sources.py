"""Data sets, written once as Parquet into the folder of the run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow.parquet as pq

from trainer.config import Data
from trainer.data.parquet import Images, read_header, to_table
from trainer.folder import RunFolder

SPLIT_SEED = 0
"""One split for all runs: accuracies of two seeds are then about the same validation images."""

VALID_SHARE = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The run's data as it lies in Parquet."""

    images: Images
    num_train: int
    num_valid: int


def prepare(data: Data, folder: RunFolder) -> Prepared:
    """Write the data set's Parquet files, unless they are there, and say what they hold."""
    if not (folder.exists(folder.train_data) and folder.exists(folder.valid_data)):
        _write(*_digits(), folder)
    images, num_train = read_header(folder, folder.train_data)
    _, num_valid = read_header(folder, folder.valid_data)
    return Prepared(images=images, num_train=num_train, num_valid=num_valid)


def _digits() -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """1,797 handwritten digits of 8x8: pixels (N, 1, 8, 8) uint8, labels, names of the classes."""
    # Only whoever writes the data needs scikit-learn.
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)  # they come as 0 to 16
    return pixels[:, None], digits.target.astype(np.int64), tuple(map(str, digits.target_names))


def split(labels: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the training and of the validation samples, each class in the same share.

    Both come in random order, so that any stretch of a file is a fair sample of it.
    """
    random = np.random.default_rng(seed)
    order = random.permutation(len(labels))
    valid = [
        of_class[: round(len(of_class) * share)]
        for label in np.unique(labels)
        for of_class in [order[labels[order] == label]]
    ]
    is_valid = np.zeros(len(labels), bool)
    is_valid[np.concatenate(valid)] = True
    return order[~is_valid[order]], order[is_valid[order]]


def _write(
    pixels_NCHW: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], folder: RunFolder
) -> None:
    train, valid = split(labels, VALID_SHARE, SPLIT_SEED)
    seen = pixels_NCHW[train] / 255
    images = Images(
        source="digits",
        shape=pixels_NCHW.shape[1:],
        classes=classes,
        mean=tuple(seen.mean(axis=(0, 2, 3)).tolist()),
        spread=tuple(seen.std(axis=(0, 2, 3)).tolist()),
    )
    for path, chosen in ((folder.train_data, train), (folder.valid_data, valid)):
        table = to_table(images, chosen, pixels_NCHW[chosen], labels[chosen])
        with folder.writing(path) as stream:
            pq.write_table(table, stream)
