"""What the launcher may rely on in `trainer.config`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trainer.config import batch_per_worker


def test_config_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys, trainer.config; "
        "print([name for name in ('torch', 'ray', 'numpy', 'pyarrow') if name in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=None
    )
    assert answer.stdout == "[]\n"


@pytest.mark.parametrize(("size", "workers", "share"), [(64, 2, 32), (64, 64, 1), (7, 1, 7)])
def test_a_global_batch_is_shared_out_equally(size: int, workers: int, share: int) -> None:
    assert batch_per_worker(size, workers) == share


def test_a_batch_that_leaves_a_rest_names_the_sizes_beside_it() -> None:
    with pytest.raises(ValueError, match=r"= 64 .* by 12 workers: 4 left over\. Use 60 or 72"):
        batch_per_worker(64, 12)


def test_a_batch_smaller_than_its_workers_is_never_rounded_to_nothing() -> None:
    with pytest.raises(ValueError, match=r"Use 8, or"):
        batch_per_worker(3, 8)
