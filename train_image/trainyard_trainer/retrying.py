"""Run the attempts of a submission one after the other, each in a process of its own.

KubeRay does this for a run with a RayCluster of its own, and refuses it on a standing RayCluster. There the
entrypoint of the Ray job is the process of this module. It imports neither torch nor Ray.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

from trainyard_trainer.run_files import exit_codes
from trainyard_trainer.run_files.standing_cluster import ATTEMPT_VARIABLE

FINAL_FAILURE = 65
"""The exit code of an attempt that has failed with an error that a retry cannot cure. Only the process that
retries sees it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How an attempt has ended."""

    exit_code: int
    is_final: bool = False
    """Whether a further attempt would fail in the same way."""


def with_retries(attempt: Callable[[], End], retries: int) -> int:
    """Run attempts until one succeeds, is stopped, or fails in a way that a retry cannot cure.

    At most `retries` follow the first one. Returns the exit code of the last attempt. In the process of an
    attempt, this function does not return. The threads of the calling process do not exist there.
    """
    stopped = False

    def note_stop(signum: int, frame: object) -> None:
        nonlocal stopped
        stopped = (
            True  # Ray sends the signal to all processes of the job, so the attempt has it, too.
        )

    signal.signal(signal.SIGTERM, note_stop)
    for number in itertools.count(1):
        exit_code = _run(attempt, number)
        if exit_code in (exit_codes.SUCCEEDED, exit_codes.WRONG_INPUT) or stopped:
            return exit_code
        if exit_code == FINAL_FAILURE:
            return exit_codes.FAILED
        if number > retries:
            return exit_code
        print(
            f"attempt {number} of {retries + 1} has failed with exit code {exit_code}", flush=True
        )
    raise AssertionError("the count never ends")


def _run(attempt: Callable[[], End], number: int) -> int:
    """Run an attempt in a child process, and return its exit code; 128 + N if signal N has killed it."""
    # A signal between the fork and the new handler must reach the child as its own.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        os.environ[ATTEMPT_VARIABLE] = f"{number}"
        end = attempt()
        is_final = end.is_final and end.exit_code == exit_codes.FAILED
        sys.exit(FINAL_FAILURE if is_final else end.exit_code)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
