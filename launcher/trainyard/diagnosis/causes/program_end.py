"""How the program ended where no more specific cause was found: signals, errors, tracebacks, exit codes."""

from __future__ import annotations

import re

from trainyard.diagnosis.causes.driver_log import (
    LOG,
    TRACEBACK_LINES,
    failed_lines,
    last_error,
    match_error,
    match_log,
)
from trainyard.diagnosis.failure import Evidence, Match, any_of, evidence, failure
from trainyard.diagnosis.snapshot import Snapshot
from trainyard.submission.status import error_lines, has_error
from trainyard_trainer.run_files.driver_output import AT_LIMIT, BY_SIGNAL, ERROR, INTERRUPTED

_TRACEBACK_FRAME = r'\s+File ".*", line \d+'


@failure(
    "run-limit",
    seen="the driver's `error: the run stopped at its limit`",
    remedy="Submit the run again: it goes on from the checkpoint that it saved before its limit. "
    "`limits.max_run_s` of the run file is the limit.",
)
def run_limit(snapshot: Snapshot) -> Match | None:
    """The run has used up the time that limits.max_run_s gives it, and its driver has stopped it."""
    lines = error_lines(snapshot.driver_log) if has_error(snapshot.driver_log) else []
    said = lines[0].removeprefix(ERROR) if lines else str((snapshot.summary or {}).get("error"))
    if not said.startswith(AT_LIMIT):
        return None
    return Match(cause=said, evidence=(evidence(LOG, said),))


@failure(
    "stopped-by-signal",
    seen="the driver's `error: the run was stopped by SIGTERM`",
    remedy="Submit the run again: it resumes from its last checkpoint. The "
    "events of the namespace show what stopped it (drain, deletion).",
)
def stopped_by_signal(snapshot: Snapshot) -> Match | None:
    """The driver was told to end (SIGTERM): its pod was deleted or its node drained."""
    return match_error(snapshot, f"{BY_SIGNAL}|{INTERRUPTED}")


@failure(
    "worker-died",
    seen="Ray's ActorDiedError, WorkerCrashedError, `killed by SIGKILL` in the driver's log",
    remedy="Most often a pod had too little memory: raise memoryGib of the pool. `trainyard logs "
    "{run} -n {namespace}` shows the worker's last lines.",
)
def worker_died(snapshot: Snapshot) -> Match | None:
    """A worker process died without an error message."""
    return match_log(
        snapshot,
        any_of(
            "ActorDiedError",
            "WorkerCrashedError",
            "The actor died unexpectedly",
            "ActorUnavailableError",
            "worker .* failed.*(SIGKILL|SIGSEGV)",
            "Worker exit type: SYSTEM_ERROR",
        ),
        "a worker process died without an error message: out of memory, a crash in native code, "
        "or its pod was deleted",
    )


@failure(
    "run-error",
    seen="the driver's `error: ...`, for any other reason",
    remedy="Do what the lines say, and submit again: the run resumes from its last checkpoint.",
)
def run_error(snapshot: Snapshot) -> Match | None:
    """The training program reports an error that is none of those above."""
    if any(line.startswith(f"{ERROR}worker ") for line in last_error(snapshot)):
        return None
    return match_error(snapshot, "^error: ")


@failure(
    "user-code",
    seen="the last traceback of the driver's log",
    remedy="Correct the code where the traceback ends, and submit again. `trainyard logs {run} -n "
    "{namespace}` has all of it.",
)
def user_code(snapshot: Snapshot) -> Match | None:
    """The code of the run raised an error."""
    told = [line for line in last_error(snapshot) if line.startswith(f"{ERROR}worker ")]
    seen = [evidence(LOG, line) for line in told]
    cause = told[0].removeprefix(ERROR) if told else ""
    if last := _last_traceback([line for line in failed_lines(snapshot) if line.strip()]):
        seen += [Evidence(LOG, line.rstrip()) for line in last[-TRACEBACK_LINES:]]
        cause = cause or _without_prefix(last[-1]).strip()
    if not seen:
        return None
    return Match(cause=f"the run's code raised an error: {cause}", evidence=tuple(seen))


def _last_traceback(lines: list[str]) -> list[str]:
    """Return the lines up to the end of the last traceback. KubeRay may have cut off the first lines."""
    frames = [
        n for n, line in enumerate(lines) if re.match(_TRACEBACK_FRAME, _without_prefix(line))
    ]
    if not frames:
        return []
    end = next(
        (n for n in range(frames[-1], len(lines)) if re.match(r"\S", _without_prefix(lines[n]))),
        len(lines) - 1,
    )
    return lines[: end + 1]


def _without_prefix(line: str) -> str:
    """Return a line without Ray's prefix, such as `(RayTrainWorker pid=12, ip=10.0.0.1) `."""
    return re.sub(r"^\([^)]*pid=[^)]*\) ", "", line)


@failure(
    "exit-code",
    seen="RayJob reason AppFailed, and nothing in the log that says why",
    remedy="Read the whole log: `trainyard logs {run} -n {namespace}`.",
)
def exit_code(snapshot: Snapshot) -> Match | None:
    """The entrypoint ended with an exit code other than 0 and without an error message."""
    message = str(snapshot.status.get("message", ""))
    found = re.search(r"failed with exit code (-?\d+)", message)
    if not snapshot.is_broken or found is None:
        return None
    lines = failed_lines(snapshot)
    return Match(
        cause=f"the driver ended with exit code {found[1]}",
        evidence=tuple(evidence(LOG, line) for line in lines[-TRACEBACK_LINES:]),
    )
