"""The environment variables that are read only once, when Python, Ray or a library is loaded.

A process that is forked from one that has loaded them already cannot have other values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set

READ_AT_LOAD = re.compile(
    r"(ARROW|ATEN|BLIS|GLIBC|GOMP|JE|KMP|LD|MALLOC|MIMALLOC|MKL|NPY|NUMPY|OMP|OPENBLAS|PYTHON|PYTORCH|TORCH"
    r"|RAY|TORCHDYNAMO|TORCHINDUCTOR|TORCHVISION)_?.*"
)
"""Variables that Python or a library reads once, when it is loaded."""

READ_WHEN_USED = re.compile(r"RAY_TRAIN_(?!V2_ENABLED).*|RAY_WARN_BLOCKING_GET_INSIDE_ASYNC")
"""Variables that Ray Train reads later; it gives them to its workers."""

NOT_COMPARED = {
    *("PYTHONPATH", "PYTHONUNBUFFERED"),  # applied to the child
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S",  # read by Ray Train
    "TORCHINDUCTOR_CACHE_DIR",  # set by PyTorch when the driver compiles; read when it is used
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # set by scikit-learn when the driver imports it
    *(
        "RAY_CLIENT_MODE",
        "RAY_LD_PRELOAD_ON_WORKERS",
        "RAY_RAYLET_PID",
    ),  # set by Ray for the raylet and its workers
}
"""Variables of such names that may differ."""


def first_difference(
    loaded: Mapping[str, str], wanted: Mapping[str, str], may_differ: Set[str] = frozenset()
) -> str | None:
    """Return the first variable that was read at load and has another value in `wanted`, or None."""
    for name in sorted({*loaded, *wanted} - NOT_COMPARED - may_differ):
        if READ_WHEN_USED.fullmatch(name) or not READ_AT_LOAD.fullmatch(name):
            continue
        if loaded.get(name) != wanted.get(name):
            return name
    return None
