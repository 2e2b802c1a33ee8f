"""Report the end of a run from its driver."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from trainyard_trainer.config.notify import NOTIFY_VARIABLE, Notify, Outcome
from trainyard_trainer.config.trainer_config import AttemptConfig
from trainyard_trainer.errors import StorageError, TrainerError
from trainyard_trainer.notices import ends
from trainyard_trainer.notices.message import message_of, without_secrets
from trainyard_trainer.notices.sender import send
from trainyard_trainer.run_files.driver_output import STOPPING_ERRORS
from trainyard_trainer.run_folder.attempt_scope import say
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.ownership.fence import Fenced
from trainyard_trainer.run_folder.ownership.lease import RunIsLive
from trainyard_trainer.run_folder.stop_signals import Leaving
from trainyard_trainer.run_folder.submission_names import attempt_cluster, submission_of


@contextmanager
def reported_end(
    config: AttemptConfig, environment: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Report how the block has ended, if the run has ended with it and has a receiver for that.

    Nothing of the report can fail the run. The address is removed from the environment of this process, so
    that no process which is started in the block inherits it.
    """
    address, started = environment.get(NOTIFY_VARIABLE, ""), time.time()
    os.environ.pop(NOTIFY_VARIABLE, None)
    is_first = environment.get("RANK", "0") == "0"  # torchrun starts several processes
    notify = config.notify if is_first else None
    if notify is None:
        yield
        return
    if notify.outcomes and not (notify.url or address):
        say(f"notify: {_source(notify, environment)} is missing: no message will be sent")
    try:
        yield
    except (Leaving, Fenced, RunIsLive):
        raise  # The run goes on in another process.
    except BaseException as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        is_stopped = isinstance(error, KeyboardInterrupt) or line.startswith(STOPPING_ERRORS)
        is_final = isinstance(error, TrainerError) and error.is_final
        outcome: Outcome = "stopped" if is_stopped else "failed"
        _report(config, notify, address, environment, outcome, line, is_final, started)
        raise
    _report(config, notify, address, environment, "succeeded", None, False, started)


def _report(
    config: AttemptConfig,
    notify: Notify,
    address: str,
    environment: Mapping[str, str],
    outcome: Outcome,
    error: str | None,
    is_final: bool,
    started: float,
) -> None:
    """Send the message about the end of a driver, if it is due and nobody has sent it."""
    storage = config.storage.absolute()
    folder = RunFolder.open(storage.path, config.name, storage.endpoint)
    summary = _summary(folder, outcome, error)
    if error is not None:
        error = without_secrets(error, [environment.get(name, "") for name in config.secrets])
    end = None
    if (submission := submission_of(environment)) is not None:
        try:
            before = ends.read_last(folder)
        except StorageError:
            before = None
        end = ends.judge(
            before,
            submission=submission,
            ray_cluster=attempt_cluster(environment),
            outcome=outcome,
            error=error,
            is_final=is_final,
            retries=config.faults.retries,
            started=started,
            now=time.time(),
        )
        is_due = end.is_end and not end.is_repeated and outcome in notify.outcomes
        try:
            if not ends.claim(folder, end.in_state("sending" if is_due else "none")):
                return
        except StorageError as trouble:
            say(f"notify: the end of the run cannot be recorded: {trouble.problem}")
        if not is_due:
            return
    elif outcome not in notify.outcomes:
        return
    message = message_of(
        config.name,
        outcome,
        error=error,
        summary=summary,
        submission=submission,
    )
    addresses = notify.url or address
    problem = send(addresses, message) if addresses else "no address"
    if problem is None:
        say(f"notify: the message was delivered: {message.title}")
    elif addresses:
        say(f"notify: the message was not delivered ({message.title}): {problem}")
    if end is not None:
        try:
            ends.settle(folder, end, is_delivered=problem is None)
        except StorageError as trouble:
            say(f"notify: its delivery cannot be recorded: {trouble.problem}")


def _source(notify: Notify, environment: Mapping[str, str]) -> str:
    """Name the place from which the address comes."""
    if submission_of(environment) is None or notify.secret is None:
        return f"the environment variable {NOTIFY_VARIABLE}"
    return f"key {notify.secret.key} of Secret {notify.secret.name}"


def _summary(folder: RunFolder, outcome: Outcome, error: str | None) -> dict[str, Any]:
    """Return summary.json, if it is that of this end; else an empty one."""
    try:
        summary: dict[str, Any] = json.loads(folder.read(folder.summary))
    except (StorageError, ValueError):
        return {}
    is_its = summary.get("outcome") == outcome and summary.get("error") == error
    return summary if is_its else {}
