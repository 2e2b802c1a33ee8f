"""The deadline of a run (`limits.max_run_s`): the driver stops the run a margin before it.

The run is stopped as `trainyard stop` does it. On a cluster the driver asks Ray to stop its own job. The
RayJob then ends as STOPPED, which KubeRay does not retry. On a laptop the driver sends itself SIGTERM.

The time counts from the start of the first driver of a submission. KubeRay starts each retry on a new
RayCluster, whose driver must know when the first one has started, so the folder has a record of it. The
record belongs to

* the RayCluster that is named in it, where a lost head is replaced;
* the next RayClusters of the same RayJob, as many as retries are left.

It is deleted when the run ends in a way that KubeRay does not retry. A RayCluster that was deleted under the
run, as when its queue suspends it, leaves no retries in it: the time then starts anew, as does KubeRay's own
deadline. `trainyard submit` withdraws the record of a failed RayJob that it creates again under the same
name.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from trainyard_trainer.config.limits import stop_after_s
from trainyard_trainer.config.trainer_config import AttemptConfig
from trainyard_trainer.environment import ray_job_of
from trainyard_trainer.errors import StorageError, TrainerError
from trainyard_trainer.run_files import names
from trainyard_trainer.run_files.driver_output import AT_LIMIT
from trainyard_trainer.run_folder.attempt_scope import say
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.stop_signals import Leaving, StoppedBySignal
from trainyard_trainer.run_folder.submission_names import attempt_cluster, submission_of

DASHBOARD = "http://127.0.0.1:8265"

STOP_REQUEST_S = 30.0
"""Seconds that Ray's dashboard has to take the request to stop the job."""

RETRY_S = 3600.0
"""Seconds after its deadline at which a record belongs to an earlier submission of the same name."""


class StoppedAtLimit(StoppedBySignal):
    """The run has used up the time that `limits.max_run_s` gives it."""

    def __init__(self, max_run_s: int, done: str) -> None:
        TrainerError.__init__(
            self,
            f"{AT_LIMIT}, limits.max_run_s = {max_run_s}{done}; submitted again, it goes on from there",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunClock:
    """When the first driver of a submission has started."""

    submission: str
    """The name of the RayJob."""
    ray_cluster: str
    """The RayCluster of the newest attempt."""
    started_at: float
    """When the first driver started, in seconds since 1970."""
    retries_left: int
    """The number of RayClusters that KubeRay may still create for this submission."""


@contextmanager
def limited(
    folder: RunFolder, config: AttemptConfig, environment: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Stop the block before the run's deadline. Raises StoppedAtLimit if that has happened."""
    max_run_s = config.limits.max_run_s
    if max_run_s is None:
        yield
        return
    clock = start_clock(folder, max_run_s, config.faults.retries, environment)
    stop = StopAtLimit(clock.started_at, max_run_s, environment)
    is_retried = False
    try:
        with stop.waited_for():
            yield
    except Leaving:
        is_retried = True
        _write(folder, replace(clock, retries_left=0))
        raise
    except StoppedBySignal:
        if stop.is_begun:
            raise StoppedAtLimit(max_run_s, _done(folder)) from None
        raise
    except Exception as error:
        is_retried = not (isinstance(error, TrainerError) and error.is_final)
        raise
    finally:
        if not is_retried and not stop.is_refused:
            folder.delete(_path(folder))


def start_clock(
    folder: RunFolder,
    max_run_s: int,
    retries: int,
    environment: Mapping[str, str] = os.environ,
    now: float | None = None,
) -> RunClock:
    """Return since when the time of this submission counts, and record it for the retries.

    Outside of a RayJob's head it counts from now, and nothing is recorded.
    """
    now = time.time() if now is None else now
    submission = submission_of(environment)
    if submission is None:
        return RunClock(submission="", ray_cluster="", started_at=now, retries_left=0)
    ray_cluster = attempt_cluster(environment)
    clock = _read(folder)
    if clock is not None and now - clock.started_at > max_run_s + RETRY_S:
        clock = None
    if clock is not None and clock.ray_cluster == ray_cluster:
        return clock
    if clock is not None and clock.submission == submission and clock.retries_left > 0:
        clock = replace(clock, ray_cluster=ray_cluster, retries_left=clock.retries_left - 1)
    else:
        clock = RunClock(
            submission=submission, ray_cluster=ray_cluster, started_at=now, retries_left=retries
        )
    _write(folder, clock)
    return clock


class StopAtLimit:
    """Stops this program's run in another thread, a margin before its deadline."""

    def __init__(
        self, started_at: float, max_run_s: int, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._stop_at = started_at + stop_after_s(max_run_s)
        self._max_run_s = max_run_s
        self._job = ray_job_of(environment)
        self._ended = threading.Event()
        self.is_begun = False
        """Whether the run was asked to stop."""
        self.is_refused = False
        """Whether Ray did not take the request, so that KubeRay counts the attempt as failed."""

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Stop the run if the time comes before the block ends."""
        thread = threading.Thread(target=self._wait, name="run-limit", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()

    def _wait(self) -> None:
        # The clock of the machine, as it is the one that all attempts share.
        while (left_s := self._stop_at - time.time()) > 0:
            if self._ended.wait(min(left_s, 60.0)):
                return
        self.is_begun = True
        say(f"limits.max_run_s = {self._max_run_s}: the run stops now, to have ended by then")
        self.is_refused = self._job is not None and not ask_ray_to_stop(self._job)
        if self._job is None or self.is_refused:
            os.kill(os.getpid(), signal.SIGTERM)


def ask_ray_to_stop(job: str) -> bool:
    """Ask Ray to stop a job: it sends SIGTERM to the entrypoint. Return whether Ray has taken the request."""
    command = ["ray", "job", "stop", "--no-wait", "--address", DASHBOARD, job]
    program = [sys.executable, "-I", "-m", "ray.scripts.scripts", *command[1:]]
    try:
        # A session of its own, as SIGTERM goes to the whole process group of the entrypoint.
        ended = subprocess.run(
            program,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=STOP_REQUEST_S,
        )
        problem = "".join(ended.stderr.strip().splitlines()[-1:]) if ended.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        say(f"Ray did not take the request `{' '.join(command)}`: {problem}")
    return not problem


def _done(folder: RunFolder) -> str:
    """Return how far the run has come, as words to add to a sentence; empty if that is not known."""
    try:
        progress = json.loads(folder.read(folder.progress))
    except (StorageError, ValueError):
        return ""
    if "steps" in progress:
        return f", after {progress['step']} of {progress['steps']} steps"
    return f", after {progress['reports']} reports of metrics" if "reports" in progress else ""


def _path(folder: RunFolder) -> str:
    return f"{folder.root}/{names.RUN_LIMIT}"


def _read(folder: RunFolder) -> RunClock | None:
    if not folder.exists(_path(folder)):
        return None
    plain = json.loads(folder.read(_path(folder)))
    return RunClock(**plain) if plain else None


def _write(folder: RunFolder, clock: RunClock) -> None:
    if clock.submission:
        folder.write(_path(folder), json.dumps(asdict(clock), indent=2))
