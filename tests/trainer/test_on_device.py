"""Pixels on their way into the model: what is drawn for an image, and what becomes of it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn import functional

from trainyard_trainer.config.data.section import Augment
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.prepared import DatasetInfo
from trainyard_trainer.recipes.image_classification.on_device import ToInput, augmented
from trainyard_trainer.recipes.random_numbers import random_numbers

CPU = torch.device("cpu")
BOTH = Augment(flip=True, crop=2)


def batch_of(ids: torch.Tensor, *, channels: int = 3, side: int = 6) -> Batch:
    """The same image for each id, in which no two pixels are equal and none is black."""
    image = torch.arange(1, channels * side * side + 1, dtype=torch.uint8)
    pixels = image.view(1, channels, side, side).repeat(len(ids), 1, 1, 1)
    return Batch({"image": pixels, "label": torch.zeros_like(ids)}, ids)


def picked(batch: Batch, indices: torch.Tensor) -> Batch:
    columns = {name: column[indices] for name, column in batch.columns.items()}
    return Batch(columns, batch.ids[indices])


def windows(image_CHW: torch.Tensor, crop: int) -> list[torch.Tensor]:
    """The image moved by up to `crop` pixels, in each way, with black around it."""
    rows, columns = image_CHW.shape[-2:]
    wide = functional.pad(image_CHW, [crop] * 4)
    return [
        wide[:, down : down + rows, right : right + columns]
        for down in range(2 * crop + 1)
        for right in range(2 * crop + 1)
    ]


def moves(changed: torch.Tensor, image: torch.Tensor, crop: int) -> list[int]:
    """For each changed image, which of the windows it is. Fails if it is none, or more than one."""
    is_equal = torch.stack(
        [(changed == window).flatten(1).all(1) for window in windows(image, crop)]
    )
    assert (is_equal.sum(dim=0) == 1).all()
    return is_equal.int().argmax(dim=0).tolist()


# What is drawn.


def splitmix64(number: int) -> int:
    """The number-th output of the generator that starts from 0, on integers of any size."""
    last_64 = 2**64 - 1
    mixed = number * 0x9E3779B97F4A7C15 & last_64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & last_64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & last_64
    return mixed ^ (mixed >> 31)


def test_the_generator_in_python_gives_its_published_numbers() -> None:
    assert [splitmix64(number) for number in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
@pytest.mark.parametrize(("epoch", "stream"), [(0, 0), (1, 2), (10**6, 1)])
def test_random_numbers_are_those_of_splitmix64(seed: int, epoch: int, stream: int) -> None:
    ids = [0, 1, 2, 1000, 2**31, 2**62]
    start = (seed * 3 + stream) * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03
    drawn = random_numbers(torch.tensor(ids), seed, epoch, stream=stream)
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == [splitmix64(number + start) >> 33 for number in ids]


def test_an_image_is_changed_alike_in_any_batch() -> None:
    ids = torch.arange(100)
    whole = batch_of(ids)
    changed = augmented(whole, BOTH, seed=3, epoch=5)

    order = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(augmented(picked(whole, order), BOTH, seed=3, epoch=5), changed[order])
    parts = [
        augmented(picked(whole, part), BOTH, seed=3, epoch=5) for part in ids.split([1, 0, 32, 67])
    ]
    assert torch.equal(torch.cat(parts), changed)


@pytest.mark.parametrize(("seed", "epoch"), [(3, 6), (4, 5)])
def test_another_epoch_or_seed_changes_images_in_another_way(seed: int, epoch: int) -> None:
    batch = batch_of(torch.arange(1000))
    before = augmented(batch, BOTH, seed=3, epoch=5)
    after = augmented(batch, BOTH, seed=seed, epoch=epoch)
    is_same = (before == after).flatten(1).all(1)
    # By chance one in 2 * 25.
    assert 5 <= is_same.sum() <= 40


def test_about_half_of_the_images_are_mirrored() -> None:
    batch = batch_of(torch.arange(10_000), channels=1)
    changed = augmented(batch, Augment(flip=True), seed=0, epoch=0)
    is_kept = (changed == batch["image"]).flatten(1).all(1)
    is_mirrored = (changed == batch["image"].flip(-1)).flatten(1).all(1)
    assert (is_kept ^ is_mirrored).all()
    assert 0.48 <= is_mirrored.double().mean() <= 0.52


def test_an_image_moves_by_at_most_so_many_pixels_and_black_comes_in() -> None:
    batch = batch_of(torch.arange(500))
    changed = augmented(batch, Augment(crop=1), seed=0, epoch=0)
    found = moves(changed, batch["image"][0], crop=1)
    assert set(found) == set(range(9))
    upper_left = changed[found.index(0), 0]
    assert upper_left[0].tolist() == [0] * 6
    assert upper_left[:, 0].tolist() == [0] * 6
    assert upper_left[1, 1] == batch["image"][0, 0, 0, 0]


def test_all_moves_occur_about_equally_often() -> None:
    batch = batch_of(torch.arange(25_000), channels=1)
    changed = augmented(batch, Augment(crop=2), seed=0, epoch=0)
    counts = Counter(moves(changed, batch["image"][0], crop=2))
    assert len(counts) == 25
    assert min(counts.values()) > 850
    assert max(counts.values()) < 1150


def test_whether_an_image_is_mirrored_does_not_depend_on_where_it_moves() -> None:
    ids = torch.arange(25_000)
    streams = [random_numbers(ids, 0, 0, stream=stream) for stream in range(3)]
    mirrored, down, right = (
        numbers % count for numbers, count in zip(streams, (2, 5, 5), strict=True)
    )
    pairs = Counter(zip(mirrored.tolist(), down.tolist(), right.tolist(), strict=True))
    assert len(pairs) == 50
    assert min(pairs.values()) > 400
    assert max(pairs.values()) < 600


def test_images_without_augmentation_stay_as_they_are() -> None:
    batch = batch_of(torch.arange(5))
    assert augmented(batch, Augment(), seed=0, epoch=0) is batch["image"]


@pytest.mark.parametrize("augment", [Augment(flip=True), Augment(crop=3), BOTH])
def test_augmented_pixels_stay_bytes_of_the_same_shape(augment: Augment) -> None:
    batch = batch_of(torch.arange(5))
    before = batch["image"].clone()
    changed = augmented(batch, augment, seed=0, epoch=0)
    assert (changed.dtype, changed.shape) == (torch.uint8, batch["image"].shape)
    assert torch.equal(batch["image"], before)
    assert augmented(batch_of(torch.arange(0)), augment, seed=0, epoch=0).shape == (0, 3, 6, 6)


def test_a_batch_moves_to_a_device_with_all_its_columns() -> None:
    here = batch_of(torch.arange(3)).to(CPU)
    assert here.ids.tolist() == [0, 1, 2]
    assert {column.device for column in here.columns.values()} == {CPU}


# What the model gets.

COLOURS = DatasetInfo(
    source="any",
    shape=(3, 6, 6),
    classes=("a", "b"),
    mean=(0.1, 0.5, 0.9),
    std=(0.2, 0.3, 0.4),
)


def as_before(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """Step by step in float64, without any shortcut."""
    mean = torch.tensor(COLOURS.mean, dtype=torch.float64).view(1, 3, 1, 1)
    std = torch.tensor(COLOURS.std, dtype=torch.float64).view(1, 3, 1, 1)
    inputs = (pixels.double() / 255 - mean) / std
    if size == pixels.shape[-1]:
        return inputs
    return functional.interpolate(inputs, size=size, mode="bilinear", antialias=True)


@pytest.mark.parametrize("size", [6, 4, 32])
def test_pixels_are_normalised_by_channel_and_resized(size: int) -> None:
    pixels = torch.randint(
        0, 256, (5, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    inputs = ToInput(COLOURS, size, CPU)(pixels)
    assert (inputs.dtype, inputs.shape) == (torch.float32, (5, 3, size, size))
    assert torch.allclose(inputs.double(), as_before(pixels, size), atol=1e-5)


def test_black_and_white_are_what_the_formula_says() -> None:
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 6, 6)
    black, white = ToInput(COLOURS, 6, CPU)(pixels)[:, :, 0, 0].tolist()
    assert black == pytest.approx([-0.1 / 0.2, -0.5 / 0.3, -0.9 / 0.4])
    assert white == pytest.approx([0.9 / 0.2, 0.5 / 0.3, 0.1 / 0.4])
