"""Record the failures of workers in failures.jsonl: a line for each, with the error and the time.

A worker group that saved its state and left a machine that is shut down has a line without rank and error.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

from trainyard_trainer.run_files.driver_output import worker_failed
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import read_lines
from trainyard_trainer.run_folder.ownership.fence import newest_group

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def record(
    folder: RunFolder, attempt: int, errors: Mapping[int, BaseException], generation: int = 0
) -> list[str]:
    """Put down the errors of a worker group by rank, and return them in words.

    Nothing comes of errors of a group that has failed already: it is looked at until all have left. A group
    whose lost workers were replaced fails anew; `generation` says how often that was.
    """
    group = newest_group(folder, attempt)
    known = [each for each in read_lines(folder, folder.failures) if is_of(each, attempt, group)]
    if any(each["generation"] == generation for each in known):
        return []
    now = round(time.time(), 3)
    failures: list[dict[str, Any]] = [
        {
            "attempt": attempt,
            "group": group,
            "generation": generation,
            "time": now,
            "rank": rank,
            "error": first_line(error),
        }
        for rank, error in sorted(errors.items())
    ]
    folder.append(folder.failures, "".join(json.dumps(failure) + "\n" for failure in failures))
    return [worker_failed(each["rank"], group, each["error"]) for each in failures]


def note_leaving(folder: RunFolder, attempt: int) -> None:
    """Put down that a worker group has left a machine that goes away."""
    leaving = {
        "attempt": attempt,
        "group": newest_group(folder, attempt),
        "generation": 0,
        "time": round(time.time(), 3),
        "rank": None,
        "error": None,
    }
    folder.append(folder.failures, json.dumps(leaving) + "\n")


def noticed_at(folder: RunFolder, attempt: int, group: int) -> float | None:
    """time.time() at which a worker group was seen to have failed for good, or has left; None if neither."""
    failures = read_lines(folder, folder.failures)
    times = [each["time"] for each in failures if is_of(each, attempt, group)]
    return times[-1] if times else None


def is_of(failure: Mapping[str, Any], attempt: int, group: int) -> bool:
    return (failure["attempt"], failure["group"]) == (attempt, group)


def first_line(error: BaseException) -> str:
    """Return the first line of the message of the innermost error, without colours."""
    inner = innermost(error)
    lines = COLOUR.sub("", str(inner)).strip().splitlines()
    return lines[0] if lines else type(inner).__name__


def innermost(error: BaseException) -> BaseException:
    """Return the error that an error of Ray wraps, or the error itself."""
    inner = error
    for wrapped in ("cause", "health_check_failure", "_base_exc"):
        found = getattr(inner, wrapped, None)
        inner = found if isinstance(found, BaseException) else inner
    return inner
