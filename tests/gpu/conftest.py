"""The device and the data of the tests that `make gpu` runs on a CUDA GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import distributed

from tests.bench import data
from trainyard_trainer.data.loading.batch import Batch
from trainyard_trainer.data.loading.local_copy import LocalCopy
from trainyard_trainer.data.prepared import Prepared


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Compute these small networks in one thread on a CPU: more would wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device that a test is for. Skips a test for CUDA where there is none."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA GPU here")
    yield torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if request.param == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def images() -> Prepared:
    """320 training and 80 validation images of 28 x 28 grey pixels in ten classes."""
    return data.opened(data.grey_images(400))


@pytest.fixture(scope="session")
def batch(images: Prepared) -> Batch:
    """64 training images and their labels."""
    return LocalCopy(images, images.train)[np.arange(64)]
