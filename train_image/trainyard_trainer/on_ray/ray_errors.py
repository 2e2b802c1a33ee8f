"""Explain errors of Ray, whose messages have many lines, colours, and tracebacks of other processes."""

from __future__ import annotations

import re

import ray.exceptions

from trainyard_trainer.run_folder import failures

LOST = (
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.RayActorError,
    ray.exceptions.ActorUnschedulableError,
)
"""The errors of Ray for a worker process that has ended unexpectedly, or whose places were given back
because its replacement did not start in time."""

LOST_REMEDY = (
    "Its process or its machine has ended, often because memory was full. When the run is started again, it "
    "goes on from its newest checkpoint."
)

SENTENCE_END = re.compile(r"(?<=[.!?])\s")
LONGEST = 200
"""The largest number of characters of an error that are shown. Longer ones end after a sentence."""


def in_one_line(error: BaseException) -> str:
    """Return the type of the innermost error and the first sentences of its message."""
    kind, line = type(failures.innermost(error)).__name__, failures.first_line(error)
    if line == kind:
        return kind
    if line.endswith(":") or len(line) > LONGEST:
        # What follows is a list, or advice for users of Ray.
        line = SENTENCE_END.split(line)[0]
    return f"{kind}: {line}"
