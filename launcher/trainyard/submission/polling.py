"""Wait until something is so, with a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable


def comes_true(
    condition: Callable[[], bool],
    *,
    limit_s: float,
    poll_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Return whether a condition holds within `limit_s` seconds; it is looked at every `poll_s` seconds."""
    deadline = clock() + limit_s
    while not condition():
        if clock() >= deadline:
            return False
        sleep(poll_s)
    return True
