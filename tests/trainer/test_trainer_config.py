"""What the launcher may rely on in `trainyard_trainer.config.trainer_config`."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from trainyard_trainer.config.data.section import Data
from trainyard_trainer.config.training.batch_share import share_batch
from trainyard_trainer.config.training.models import Model
from trainyard_trainer.config.training.train import ImageClassification


def test_config_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys, trainyard_trainer.config.trainer_config; "
        "print([name for name in ('torch', 'ray', 'numpy', 'pyarrow') if name in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=None
    )
    assert answer.stdout == "[]\n"


def train_section(size: int, micro: int | None = None) -> ImageClassification:
    model = Model(name="resnet18", in_channels=1, num_classes=10)
    return ImageClassification(
        model=model, epochs=1, global_batch_size=size, micro_batch_size=micro
    )


@pytest.mark.parametrize(
    ("size", "workers", "micro", "share", "passes"),
    [(64, 2, None, 32, 1), (64, 64, None, 1, 1), (7, 1, None, 7, 1), (64, 2, 8, 32, 4)],
)
def test_a_global_batch_is_shared_out_equally(
    size: int, workers: int, micro: int | None, share: int, passes: int
) -> None:
    batch = share_batch(train_section(size, micro), workers)
    assert (batch.samples, batch.accumulation) == (share, passes)


@pytest.mark.parametrize(
    ("size", "workers", "micro", "message"),
    [
        (64, 12, None, r"= 64 .* by 12 workers: 4 left over\. Use 60 or 72"),
        (3, 8, None, r"Use 8, or"),
        (64, 2, 12, r"micro_batch_size = 12 does not divide the 32 samples .* Use 8, or another"),
        (64, 2, 64, r"micro_batch_size = 64 does not divide the 32 samples .* Use 32, or"),
    ],
)
def test_a_batch_is_never_rounded(size: int, workers: int, micro: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        share_batch(train_section(size, micro), workers)


@pytest.mark.parametrize("source", ["digit", "mnist", "s3:bucket"])
def test_a_source_is_a_known_name_or_a_path(source: str) -> None:
    with pytest.raises(ValidationError, match=f"a path with a slash in it such as ./{source}"):
        Data(source=source)
