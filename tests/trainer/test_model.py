"""Any torchvision classification model, made to fit the data."""

from __future__ import annotations

import pytest
import torch

from trainyard_trainer.config.training.models import Model
from trainyard_trainer.data.prepared import DatasetInfo
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.image_classification.model import (
    build_model,
    check_fit,
    check_model,
    takes_one_image,
)

DIGITS = DatasetInfo(
    source="digits", shape=(1, 8, 8), classes=tuple("0123456789"), mean=(0.3,), std=(0.4,)
)


def model(name: str = "resnet18", *, channels: int = 1, classes: int = 10, size: int = 32) -> Model:
    return Model(name=name, in_channels=channels, num_classes=classes, image_size=size)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet18", 32),
        ("mobilenet_v3_small", 32),
        ("densenet121", 32),
        ("efficientnet_b0", 32),
        ("convnext_tiny", 32),
        ("shufflenet_v2_x0_5", 32),
        ("vit_b_16", 32),
        ("googlenet", 32),
        ("inception_v3", 80),
    ],
)
@pytest.mark.parametrize("channels", [1, 4])
def test_a_model_takes_the_channels_and_gives_the_classes(
    name: str, size: int, channels: int
) -> None:
    with torch.device("meta"):
        network = build_model(model(name, channels=channels, classes=7, size=size))
        assert network.train()(torch.empty(2, channels, size, size)).shape == (2, 7)


def test_three_channels_leave_the_model_as_it_is() -> None:
    torch.manual_seed(0)
    ours = build_model(model(channels=3))
    assert ours.conv1.weight.shape == (64, 3, 7, 7)
    assert check_model(model(channels=3)) == 11_181_642
    assert check_model(model(channels=1)) == 11_175_370


@pytest.mark.parametrize(
    ("name", "near"),
    [("resnet-18", "resnet18"), ("ResNet50", "resnet50"), ("mobilnet_v2", "mobilenet_v2")],
)
def test_an_unknown_model_names_the_near_miss(name: str, near: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"model\.name = {name} is not .*\n.*Did you mean .*{near}"
    ):
        build_model(model(name))


def test_a_name_like_none_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"Known are alexnet, .* wide_resnet50_2\."):
        build_model(model("xxxxxxxx"))


def test_images_too_small_for_the_model_are_refused_before_training() -> None:
    with pytest.raises(ConfigError, match=r"alexnet cannot take images of .*image_size = 16"):
        check_model(model("alexnet", size=16))


@pytest.mark.parametrize(
    ("wrong", "numbers"),
    [
        (model(channels=3), r"in_channels = 3, but digits has 1 channel\(s\): use 1\."),
        (model(classes=7), r"num_classes = 7, but digits has 10 classes: use 10\."),
    ],
)
def test_a_model_for_other_data_is_refused_with_both_numbers(wrong: Model, numbers: str) -> None:
    with pytest.raises(ConfigError, match=numbers):
        check_fit(wrong, DIGITS)


@pytest.mark.parametrize(
    ("name", "size", "takes_one"),
    [
        ("resnet18", 32, False),
        # Its last feature map has several pixels, over which batch norm can take a mean.
        ("resnet18", 64, True),
        ("shufflenet_v2_x0_5", 8, False),
        ("vit_b_16", 32, True),
        ("alexnet", 64, True),
    ],
)
def test_a_model_without_batch_norm_or_with_large_images_learns_from_one(
    name: str, size: int, takes_one: bool
) -> None:
    assert takes_one_image(model(name, size=size)) is takes_one
