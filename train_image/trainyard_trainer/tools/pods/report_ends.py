"""Report the ends of runs whose drivers could not do it: they are gone, or have never started.

    python -m trainyard_trainer.tools.pods.report_ends [--secret NAME/KEY]

The chart's CronJob (`notify.watch`) runs this in its namespace. It lists the RayJobs there, and sends a
message for each run that has ended and that no driver has reported, also where the receiver of a driver's
message was down. TRAINYARD_NOTIFY_URL has the address of the platform's receiver, and `--secret` names the
Secret that it comes from. A run whose `notify` names another Secret is left out, since this program may read
none. It prints one line for each message.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping

from trainyard_trainer.config.notify import NOTIFY_VARIABLE, Notify
from trainyard_trainer.errors import StorageError
from trainyard_trainer.notices import ends
from trainyard_trainer.notices.api_server import ApiServer
from trainyard_trainer.notices.ends import DriverEnd
from trainyard_trainer.notices.message import message_of
from trainyard_trainer.notices.rayjobs import EndedRayJob, ended_rayjobs
from trainyard_trainer.notices.sender import send
from trainyard_trainer.run_folder.folder import RunFolder

SETTLE_S = 120.0
"""Seconds after the end of a RayJob in which its driver may still report it."""

RETRY_S = 86400.0
"""Seconds after the end of a RayJob in which its message is sent; older ends are left alone."""

CLOCK_S = 60.0
"""Seconds by which the clocks of the API server and of a driver may differ."""


def report_ends(
    jobs: Iterable[EndedRayJob], address: str, secret: str, now: float | None = None
) -> Iterator[str]:
    """Send the messages that are due, and yield a line for each.

    `address` is that of the platform's receiver, from the key `secret` of a Secret, as NAME/KEY.
    """
    now = time.time() if now is None else now
    for job in jobs:
        notify = job.config.notify
        assert notify is not None
        if not SETTLE_S <= now - job.ended <= RETRY_S or job.outcome not in notify.outcomes:
            continue
        try:
            line = _report(job, _addresses(notify, address, secret), now)
        except StorageError as error:
            line = f"{job.name}: its folder cannot be used: {error.problem}"
        if line:
            yield line


def _report(job: EndedRayJob, addresses: str, now: float) -> str:
    """Send the message about one RayJob if it is due; return a line about it, or an empty text."""
    storage = job.config.storage
    folder = RunFolder.open(storage.path, job.config.name, storage.endpoint)
    key, end = _notice_of(folder, job)
    if end is not None and end.state in ("none", "delivered"):
        return ""
    if not addresses:
        return f"{job.name} {job.outcome}: its receiver is in a Secret that is not the platform's"
    if end is None:
        end = DriverEnd(
            submission=job.name,
            ray_cluster="",
            outcome=job.outcome,
            error=_error_of(folder, job),
            is_end=True,
            is_repeated=False,
            failures=0,
            retries_left=0,
            time=now,
            state="sending",
        )
        if not ends.claim(folder, end, key):
            return ""
    message = message_of(
        job.config.name, end.outcome, error=end.error, summary={}, submission=job.name
    )
    problem = send(addresses, message)
    ends.settle(folder, end, key, is_delivered=problem is None)
    return f"{job.name} {end.outcome}: {problem or 'the message was delivered'}"


def _notice_of(folder: RunFolder, job: EndedRayJob) -> tuple[str, DriverEnd | None]:
    """Return the notice of the end of a RayJob: its key, and its content if somebody has created it.

    A RayJob of the same name may have ended before. What was reported before this one was created is its.
    """
    told = [
        (key, end)
        for key, end in ends.notices(folder)
        if end.submission == job.name and end.is_end and end.time >= job.created - CLOCK_S
    ]
    own = [(key, end) for key, end in told if not end.is_repeated]
    return (own or told)[-1] if told else (job.uid, None)


def _error_of(folder: RunFolder, job: EndedRayJob) -> str | None:
    """Return the error of the last driver of a RayJob that has failed; else the reason that KubeRay gives."""
    if job.outcome != "failed":
        return None
    errors = [
        (end.time, end.error)
        for _, end in ends.notices(folder)
        if end.submission == job.name and end.time >= job.created - CLOCK_S and end.error
    ]
    return max(errors)[1] if errors else job.reason or None


def _addresses(notify: Notify, address: str, secret: str) -> str:
    """Return the addresses of a run's receiver; empty if this program cannot know them."""
    if notify.secret is None:
        return notify.url or ""
    return address if secret == f"{notify.secret.name}/{notify.secret.key}" else ""


def main(arguments: list[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainyard_trainer.tools.pods.report_ends", allow_abbrev=False
    )
    parser.add_argument(
        "--secret", default="", metavar="NAME/KEY", help="where the address is from"
    )
    wanted = parser.parse_args(arguments)
    server = ApiServer.of(environment)
    address = environment.get(NOTIFY_VARIABLE, "")
    jobs = ended_rayjobs(server.get, server.namespace)
    for line in report_ends(jobs, address, wanted.secret):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
