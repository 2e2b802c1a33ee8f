"""The command `logs`: print the log of a run's driver or of one of its workers."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from trainyard.cli.options import (
    NAMESPACE,
    Context,
    RunName,
    check_namespace_option,
    local_storage_option,
    open_cluster_to_change,
    open_run_folder,
    run_name,
)
from trainyard.cli.record_lines import log_line
from trainyard.labels import RUN_LABEL
from trainyard.run import head_of, last_job, no_run

if TYPE_CHECKING:
    from trainyard.cluster.cluster import Cluster
    from trainyard.submission.run_folder.kept_logs import WantedLog

Object = dict[str, Any]

GivenNamespace = Annotated[
    Optional[str],
    typer.Option(
        "--namespace",
        "-n",
        metavar="NAMESPACE",
        help=f"The Kubernetes namespace.  [default: {NAMESPACE}]",
        callback=lambda given: given and check_namespace_option(given),
    ),
]
Worker = Annotated[
    Optional[int],
    typer.Option(metavar="RANK", min=0, help="Print the log of a worker instead of the driver's."),
]
Attempt = Annotated[
    Optional[int],
    typer.Option(metavar="N", min=1, help="Print the log of attempt N, from the run's folder."),
]
Previous = Annotated[
    bool,
    typer.Option(
        "--previous",
        "-p",
        help="Print the log of the attempt, or of the worker's process, before the newest.",
    ),
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")]
Since = Annotated[
    Optional[str],
    typer.Option(
        metavar="5m", help="Print only the last seconds, minutes or hours, such as 90s, 5m or 2h."
    ),
]
Tail = Annotated[
    Optional[int],
    typer.Option(
        metavar="N",
        min=0,
        help="Print only the last N lines; of a running worker, those of its output and of its errors.",
    ),
]
Storage = Annotated[
    Optional[Path],
    typer.Option(
        metavar="DIR",
        parser=local_storage_option,
        help="Read the logs of a run of this machine, whose folder is in DIR.",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPart:
    """Which part of a log is printed; all of it by default."""

    since_s: int | None = None
    """What was written in the last seconds."""
    tail: int | None = None
    """The last lines."""
    follow: bool = False
    """Also what is written from now on, until the log ends."""

    def print_kept(self, text: str | None) -> None:
        """Print this part of a log that is in a file: records of a run in words, other lines as they are."""
        for line in deque((text or "").splitlines(), maxlen=self.tail):
            typer.echo(log_line(line))


def logs(
    name: RunName,
    namespace: GivenNamespace = None,
    context: Context = None,
    worker: Worker = None,
    attempt: Attempt = None,
    previous: Previous = False,
    follow: Follow = False,
    since: Since = None,
    tail: Tail = None,
    storage: Storage = None,
) -> None:
    """Print the log of a run's driver or of a worker: of the pod or, if that is gone, of the run's folder."""
    name = run_name(name)
    wanted = _wanted_log(worker, attempt, previous)
    is_newest = attempt is None and not previous
    part = LogPart(since_s=None if since is None else _seconds(since), tail=tail, follow=follow)
    _require_options_fit(wanted, is_newest, part)
    if storage is not None:
        _require_no_cluster_options(namespace, context, part)
        _print_log_of_this_machine(storage / name, wanted, part)
        return
    cluster = open_cluster_to_change(namespace or NAMESPACE, context)
    job = last_job(cluster, name)
    head = head_of(cluster, job)
    if head is None and follow and worker is None and job is not None:
        head = _await_head(cluster, name, job)
    if head is None or not is_newest:
        _print_kept_log(cluster, name, job, head, wanted, part)
    elif worker is not None:
        assert job is not None
        _print_worker_log(cluster, job, wanted, head, part)
    else:
        assert job is not None
        _print_driver_log(cluster, job, head, part)


def _wanted_log(worker: int | None, attempt: int | None, previous: bool) -> WantedLog:
    """Return which log is meant. Raises ConfigError for two options that exclude each other."""
    from trainyard.errors import ConfigError
    from trainyard.submission.run_folder.kept_logs import WantedLog

    if previous and attempt is not None:
        raise ConfigError("--attempt and --previous exclude each other")
    return WantedLog(worker=worker, attempt=attempt, is_previous=previous)


def _require_options_fit(wanted: WantedLog, is_newest: bool, part: LogPart) -> None:
    """Raise ConfigError for a part that the log cannot have."""
    from trainyard.errors import ConfigError

    if part.since_s is not None and (wanted.worker is not None or not is_newest):
        raise ConfigError(
            "--since is only for the log of a running driver: logs in a run's folder have no times",
            "--tail N prints the last N lines of any log.",
        )
    if part.since_s is not None and part.tail is not None:
        raise ConfigError("--since and --tail exclude each other")
    if part.follow and not is_newest:
        raise ConfigError("--follow is only for the newest log")


def _require_no_cluster_options(namespace: str | None, context: str | None, part: LogPart) -> None:
    """Raise ConfigError for an option that `--storage` excludes."""
    from trainyard.errors import ConfigError

    options = {
        "--namespace": namespace is not None,
        "--context": context is not None,
        "--follow": part.follow,
        "--since": part.since_s is not None,
    }
    for option, is_given in options.items():
        if is_given:
            raise ConfigError(f"--storage and {option} exclude each other")


def _print_log_of_this_machine(folder: Path, wanted: WantedLog, part: LogPart) -> None:
    """Print a log from the folder of a run of this machine."""
    from trainyard.local.results import LocalFiles

    files = LocalFiles(folder)
    part.print_kept(files.read(wanted.choose(folder.name, files.files())))


def _await_head(cluster: Cluster, name: str, job: Object) -> str | None:
    """Wait for the run's head pod and return its name; None if the run ends before."""
    from trainyard.cli import show
    from trainyard.submission.submit import is_live
    from trainyard.submission.watch import watch_submission

    if not is_live(job):
        return None
    show.say(f"run {name} has no log yet: waiting for its head pod")
    for _ in watch_submission(cluster, job["metadata"]["name"], name):
        if (head := head_of(cluster, last_job(cluster, name))) is not None:
            return head
    return None


def _print_driver_log(cluster: Cluster, job: Object, head: str, part: LogPart) -> None:
    """Print the log of a running driver."""
    from trainyard.cluster.follow import follow_log
    from trainyard.submission.current_status import HEAD_CONTAINER
    from trainyard.submission.driver_log import lines_of_driver, lines_that_hold
    from trainyard_trainer.run_files.standing_cluster import standing_cluster_of

    is_shared = standing_cluster_of(job) is not None
    tail = part.tail
    lines: Iterable[str]
    if part.follow:
        if tail and is_shared:
            tail = lines_that_hold(job, cluster.log(head, HEAD_CONTAINER).splitlines(), tail)
        followed = follow_log(cluster, head, HEAD_CONTAINER, since_s=part.since_s, tail_lines=tail)
        lines = lines_of_driver(job, followed)
    else:
        # The last lines of a shared log may be those of other drivers.
        log = cluster.log(
            head, HEAD_CONTAINER, part.since_s, tail_lines=None if is_shared else tail
        )
        lines = deque(lines_of_driver(job, log.splitlines()), maxlen=tail)
    for line in lines:
        typer.echo(log_line(line))


def _print_kept_log(
    cluster: Cluster,
    name: str,
    job: Object | None,
    head: str | None,
    wanted: WantedLog,
    part: LogPart,
) -> None:
    """Print a log from the run's folder."""
    from trainyard.errors import ConfigError
    from trainyard.submission.run_folder.kept_logs import attempts_with_log
    from trainyard.submission.submit import is_live

    with open_run_folder(cluster, name, head) as folder:
        files = folder.files()
        has_log = bool(attempts_with_log(files))
        if not has_log and job is not None and is_live(job):
            raise ConfigError(
                f"run {name} has no log yet: its driver has not started",
                f"`trainyard logs {name} -f {cluster.options}` waits for it, and "
                f"`trainyard watch {name} {cluster.options}` shows what it waits for.",
            )
        if not has_log:
            raise no_run(name, cluster)
        text = folder.read(wanted.choose(name, files))
    part.print_kept(text)


def _print_worker_log(
    cluster: Cluster, job: Object, wanted: WantedLog, head: str, part: LogPart
) -> None:
    """Print the log of a worker: from Ray's files in its pod or, if that is gone, from the run's folder."""
    from trainyard.errors import ConfigError
    from trainyard.submission.workers import locate_worker

    assert wanted.worker is not None
    name = job["metadata"]["labels"][RUN_LABEL]
    with open_run_folder(cluster, name, head) as folder:
        try:
            place = locate_worker(cluster, name, folder.workers(), wanted.worker, job)
        except ConfigError:
            if part.follow:
                raise
            text = folder.read(wanted.choose(name, folder.files()))
            part.print_kept(text)
            return
    first = "+1" if part.tail is None else part.tail
    files = f"/tmp/ray/session_latest/logs/worker-{place.ray_worker}-*"
    command = f"tail -n {first} -q {'-F ' if part.follow else ''}{files}"
    with cluster.execute(place.pod, place.container, ["sh", "-c", command]) as process:
        for _, data in process.output():
            typer.echo(data, nl=False)


def _seconds(text: str) -> int:
    """Return the seconds of a duration such as `90s`, `5m`, `2h` or `1d`. Raises ConfigError."""
    from trainyard.errors import ConfigError

    found = re.fullmatch(r"(\d+)([smhd])", text)
    if found is None:
        raise ConfigError(f"--since = {text!r}: must be a number and s, m, h or d, such as 5m")
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]
