"""The command that trains many runs of one run file, and compares them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, TypeVar

import typer

from launcher.commands.options import (
    NAMESPACE,
    Gpus,
    Json,
    Name,
    Namespace,
    PlatformFile,
    RunFile,
    Settings,
    Workers,
    code_of,
    objects_of,
    platform_of,
    print_json,
)

if TYPE_CHECKING:
    from launcher.cluster import Cluster
    from launcher.errors import LauncherError
    from launcher.kuberay import RayjobApi
    from launcher.overlay import Overlay
    from launcher.platform import Platform
    from launcher.sweep.combinations import Combination
    from launcher.sweep.course import Change, Sweep
    from launcher.sweep.outcomes import Goal, Outcome

Object = dict[str, Any]
T = TypeVar("T")
Upload = Optional[Callable[[], None]]
"""What brings the code of a run to its folder, where it does not travel in the RayJob."""

AT_ONCE = 4
STORAGE = Path("runs")


def sweep(
    run_file: RunFile,
    swept: Annotated[
        list[str],
        typer.Argument(metavar="KEY=V1,V2...", help="A key of the run file, and its values."),
    ],
    settings: Settings = None,
    gpus: Gpus = None,
    workers: Workers = None,
    name: Name = None,
    max_parallel: Annotated[
        Optional[int],
        typer.Option(
            metavar="N", min=1, help=f"Runs that are live at once; {AT_ONCE} unless told."
        ),
    ] = None,
    metric: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="What tells the best run: the highest; of what ends in loss, the lowest. "
            "--metric=-NAME: the lowest of any other.",
        ),
    ] = "val_accuracy",
    platform_file: PlatformFile = None,
    namespace: Namespace = NAMESPACE,
    here: Annotated[
        bool, typer.Option("--here", help="On this machine, one run after the other.")
    ] = False,
    storage: Annotated[
        Optional[Path],
        typer.Option(
            metavar="DIR", help=f"With --here, where the folders lie; {STORAGE} unless told."
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Train each combination of some values as a run of its own, and compare them; again, it goes on."""
    from launcher import show
    from launcher.errors import ConfigError
    from launcher.sweep.combinations import load_sweep
    from launcher.sweep.outcomes import goal_of, rows_of, table_of_rows

    if here and max_parallel not in (None, 1):
        raise ConfigError(
            f"--max-parallel {max_parallel} is for a cluster: --here trains one run after the other",
            "Leave it out.",
        )
    if here and platform_file is not None:
        raise ConfigError("--platform is for a cluster, and --here needs none: leave one out")
    if storage is not None and not here:
        raise ConfigError("--storage is for --here: on a cluster the platform says where runs lie")
    combinations = load_sweep(
        run_file, swept, settings or (), gpus=gpus, workers=workers, name=name
    )
    goal = goal_of(metric, [combination.run for combination in combinations])
    if here:
        outcomes = _train_here(combinations, goal, storage or STORAGE)
    else:
        outcomes = _train_on_cluster(
            combinations, goal, namespace, platform_file, max_parallel or AT_ONCE
        )
    rows = rows_of(combinations, outcomes, goal)
    if as_json:
        print_json({"runs": rows})
    else:
        show.table(*table_of_rows(rows, goal))
    failed = [row["run"] for row in rows if row["phase"] != "succeeded"]
    show.say(f"{len(rows)} runs: {len(rows) - len(failed)} succeeded, {len(failed)} did not")
    if len(failed) < len(rows) and not any(row["best"] for row in rows):
        told = sorted({name for row in rows for name in row["metrics"]})
        show.say(f"no run has told {goal.metric}; told were: {', '.join(told) or 'no metrics'}")
    if failed and not here:
        show.say(f"`trainyard explain {failed[0]} -n {namespace}` says why")
    return 1 if failed else 0


# On a cluster.


def _train_on_cluster(
    combinations: Sequence[Combination],
    goal: Goal,
    namespace: str,
    platform_file: Path | None,
    at_once: int,
) -> Mapping[str, Outcome]:
    """How each run has ended. All of them are planned and checked before the first is submitted."""
    from launcher import show
    from launcher.api import upload_of
    from launcher.cluster import Cluster
    from launcher.kuberay import RayjobApi
    from launcher.sweep.combinations import naming
    from launcher.sweep.course import Sweep

    cluster = Cluster(namespace)
    platform = platform_of(platform_file, platform_file is None, namespace, cluster)
    jobs: dict[str, Object] = {}
    uploads: dict[str, Upload] = {}
    codes: dict[str, Overlay] = {}  # large, and most runs have the same
    configs: dict[str, Object] = {}
    for combination in combinations:
        with naming(combination):
            planned, jobs[combination.name] = objects_of(combination.run, platform, namespace)
        configs[combination.name] = planned.trainer.model_dump(mode="json")
        code = planned.code and codes.setdefault(planned.code.sha256, planned.code)
        told = show.UploadView(combination.name)
        uploads[combination.name] = upload_of(cluster, platform, combination.name, code, told)
    story = Story(cluster, platform, combinations, goal)
    others = _other_submissions(RayjobApi(cluster), combinations, jobs)
    story.note_trained_before(others, configs)
    runs = [run for run in jobs if run not in story.outcomes]
    show.say(f"a sweep of {len(jobs)} runs, at most {at_once} of them at once")
    its = Sweep(runs, at_once)
    try:
        carry_out(cluster, its, jobs, uploads, story)
    except KeyboardInterrupt:
        show.say(
            f"detached: {len(its.live)} runs go on (`trainyard list -n {namespace}`), "
            f"{len(its.waiting)} were not submitted; the same command goes on with them"
        )
        raise
    story.complete()
    return story.outcomes


def _other_submissions(
    rayjobs: RayjobApi, combinations: Sequence[Combination], jobs: Mapping[str, Object]
) -> list[str]:
    """Runs that have succeeded, but by other RayJobs than these: of another platform, or other epochs.

    Raises ConfigError or ClusterError where a run cannot be submitted as it is now.
    """
    from launcher.kuberay import RUN_LABEL
    from launcher.submit import find_same
    from launcher.sweep.combinations import naming
    from launcher.watch import phase_of

    phases: dict[str, dict[str, str]] = {}
    for job in rayjobs.list_jobs():
        phase = phase_of(job.get("status", {}))
        phases.setdefault(job["metadata"]["labels"][RUN_LABEL], {})[job["metadata"]["name"]] = phase
    found = []
    for combination in combinations:
        its = phases.get(combination.name)
        if its is None:
            continue
        with naming(combination):
            find_same(rayjobs, jobs[combination.name], is_fresh=False)
        if "succeeded" in its.values() and jobs[combination.name]["metadata"]["name"] not in its:
            found.append(combination.name)
    return found


def carry_out(
    cluster: Any,
    its: Sweep,
    jobs: Mapping[str, Object],
    uploads: Mapping[str, Upload],
    story: Story,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Submit what is due, and follow all of it to the end.

    One watch on all our RayJobs tells of every run; while nothing changes, nothing is asked. After
    submissions it begins again with a list, so that nothing is heard that is older than they are.
    Raises ClusterUnreachable if the cluster is away too long.
    """
    from launcher.errors import ClusterError, ClusterUnreachable, ConfigError
    from launcher.follow import follow
    from launcher.kuberay import OWNER_LABELS, RayjobApi
    from launcher.submit import submit_run
    from launcher.watch import phase_of

    rayjobs = RayjobApi(cluster)
    runs = {job["metadata"]["name"]: run for run, job in jobs.items()}
    while not its.is_over:
        for state in follow(cluster, "RayJob", OWNER_LABELS, clock=clock, sleep=sleep):
            there = {runs[name]: job for name, job in state.items() if name in runs}
            phases = {run: phase_of(job.get("status", {})) for run, job in there.items()}
            for change in its.hear(phases):
                story.hear(change, there.get(change.run))
            if its.due or its.is_over:
                break
        for run in its.due:
            try:
                send = partial(submit_run, rayjobs, jobs[run], upload=uploads[run])
                how = patiently(send, clock, sleep)
            except ClusterUnreachable:
                raise
            except (ClusterError, ConfigError) as error:
                its.refuse(run)
                story.note_refused(run, error)
            else:
                its.submit(run)
                story.note_submitted(run, how)


def patiently(
    ask: Callable[[], T],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What a cluster answers that may be away for some minutes. Raises ClusterError."""
    from launcher.errors import ClusterError, ClusterUnreachable
    from launcher.follow import TRANSIENT, Patience

    patience = Patience(clock, sleep)
    patience.heard()  # it has answered before
    while True:
        try:
            return ask()
        except ClusterError as error:
            if not isinstance(error, ClusterUnreachable) and error.reason not in TRANSIENT:
                raise
            patience.wait(error)


class Story:
    """What becomes of the runs: said in a line each, and kept.

    How a run has ended its RayJob says. What it has reached is in the end of its head's log, one small
    question that needs no right beyond those of `watch`; the platform keeps a head for minutes, and it is
    asked when the run ends. What the log does not say is read from the run's folder: through its head
    where that is there, else through one reader pod for all such runs, after the last has ended.
    """

    def __init__(
        self, cluster: Cluster, platform: Platform, combinations: Sequence[Combination], goal: Goal
    ) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._cluster = cluster
        self._platform = platform
        self._goal = goal
        self._words = {combination.name: str(combination) for combination in combinations}

    def note_submitted(self, run: str, how: str) -> None:
        words = {"created": "submitted", "resubmitted": "submitted again"}
        self._say(run, words.get(how, "live already"))

    def note_refused(self, run: str, error: LauncherError) -> None:
        from launcher.sweep.outcomes import Outcome

        self.outcomes[run] = Outcome(phase="failed", message=f"not submitted: {error.what}")
        self._say(run, self.outcomes[run].message)

    def hear(self, change: Change, job: Object | None) -> None:
        from launcher.watch import ENDED

        if change.after in ENDED:
            self.outcomes[change.run] = outcome = self._ended(change, job)
            self._say(
                change.run, outcome_text(outcome, self._goal, is_new=change.before is not None)
            )
        elif change.before is None:
            self._say(change.run, f"live already ({change.after})")
        elif change.after in ("running", "retrying", "suspended"):
            self._say(change.run, change.after)

    def note_trained_before(self, runs: Sequence[str], configs: Mapping[str, Object]) -> None:
        """Those of the runs whose folders say that just this was trained are not trained again."""
        from launcher.reader import open_folder
        from launcher.sweep.outcomes import Outcome, completed, has_trained

        if not runs:
            return
        with open_folder(self._cluster, self._platform, runs[0]) as first:
            for run in runs:
                folder = first.sibling(run)
                if has_trained(folder, configs[run]):
                    outcome = completed(Outcome(phase="succeeded"), folder, self._goal)
                    self.outcomes[run] = outcome
                    self._say(run, outcome_text(outcome, self._goal, is_new=False))

    def complete(self) -> None:
        """Read what is not known yet of runs that have succeeded."""
        from launcher import show
        from launcher.errors import ClusterError
        from launcher.reader import open_folder
        from launcher.sweep.outcomes import completed

        runs = [run for run, outcome in self.outcomes.items() if outcome.lacks(self._goal)]
        if not runs:
            return
        try:
            with open_folder(self._cluster, self._platform, runs[0]) as first:
                for run in runs:
                    folder = first.sibling(run)
                    self.outcomes[run] = completed(self.outcomes[run], folder, self._goal)
        except ClusterError as error:
            show.say(f"what {len(runs)} runs have reached could not be read: {error.what}")

    def _ended(self, change: Change, job: Object | None) -> Outcome:
        from launcher.errors import ClusterError, ClusterUnreachable
        from launcher.reader import open_folder
        from launcher.sweep.outcomes import Outcome, completed
        from launcher.watch import head_pod, look, sight_of

        if job is None:
            return Outcome(phase=change.after, message="its RayJob was deleted")
        sight = sight_of(job)
        outcome = Outcome(phase=sight.phase, message=sight.message)
        try:
            sight = patiently(partial(look, self._cluster, job))
            outcome = Outcome(
                phase=sight.phase,
                message=sight.message,
                progress=sight.progress,
                summary=sight.summary,
            )
            ray_cluster = job.get("status", {}).get("rayClusterName", "")
            head = head_pod(self._cluster, ray_cluster) if outcome.lacks(self._goal) else None
            if head is not None:
                with open_folder(self._cluster, self._platform, change.run, head) as folder:
                    outcome = completed(outcome, folder, self._goal)
        except ClusterUnreachable:
            raise
        except ClusterError:
            return outcome  # its folder is asked at the end
        return outcome

    def _say(self, run: str, words: str) -> None:
        from launcher import show

        show.say(f"{run} ({self._words[run]}): {words}")


def outcome_text(outcome: Outcome, goal: Goal, *, is_new: bool) -> str:
    """How a run has ended, in a line."""
    if outcome.phase != "succeeded":
        return f"{outcome.phase}: {outcome.message}".removesuffix(": ")
    value = outcome.metrics.get(goal.metric)
    told = "" if value is None else f": {goal.metric} {value:.4g}"
    return f"succeeded{'' if is_new else ' before'}{told}"


# On this machine.


def _train_here(
    combinations: Sequence[Combination], goal: Goal, storage: Path
) -> Mapping[str, Outcome]:
    """How each run has ended. All of them are checked before the first begins."""
    from launcher import show
    from launcher.local import NEEDED, local_config
    from launcher.program import require_packages
    from launcher.result import LocalFiles
    from launcher.sweep.combinations import naming
    from launcher.sweep.outcomes import Outcome, completed, has_trained

    require_packages(NEEDED, "training")
    attempts = []
    for combination in combinations:
        with naming(combination):
            code = code_of(combination.run)
            config = local_config(combination.run, storage, os.cpu_count() or 1, "ray", code)
        attempts.append((combination, config, code))
    show.say(f"a sweep of {len(attempts)} runs, one after the other")
    outcomes: dict[str, Outcome] = {}
    for combination, config, code in attempts:
        folder = LocalFiles(storage / combination.name)
        is_new = not has_trained(folder, _as_kept(config.model_dump(mode="json")))
        if is_new:
            show.say(f"{combination.name} ({combination}): running")
        outcome = _train_one(config, code) if is_new else Outcome(phase="succeeded")
        outcomes[combination.name] = outcome = completed(outcome, folder, goal)
        show.say(
            f"{combination.name} ({combination}): {outcome_text(outcome, goal, is_new=is_new)}"
        )
    return outcomes


def _as_kept(config: Object) -> Object:
    """The config as the trainer keeps it: with paths that lead there from everywhere."""
    data = config.get("data")
    if data is None:
        return config
    places = {
        key: str(Path(path).resolve())
        for key in ("source", "valid_source")
        if (path := data[key]) and "/" in path and "://" not in path
    }
    return config | {"data": data | places}


def _train_one(config: Any, code: Any) -> Outcome:
    """Train a run to its end; what it has reached is left to its folder."""
    from launcher import show
    from launcher.errors import ConfigError, RunFailed
    from launcher.local import train_locally
    from launcher.sweep.outcomes import Outcome

    try:
        with closing(train_locally(config, "ray", code)) as sights:
            for _ in sights:
                pass
    except (ConfigError, RunFailed) as error:
        return Outcome(phase="failed", message=error.details[0] if error.details else error.what)
    except KeyboardInterrupt:
        show.say(f"run {config.name} was interrupted: the same command goes on with the sweep")
        raise
    return Outcome(phase="succeeded")
