"""One drill: a run is submitted, struck at a step, followed to its end, and what that cost is told."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from launcher.cluster import Cluster
from launcher.drill.report import Report, missed
from launcher.drill.scenarios import Scenario
from launcher.drill.strikes import Target
from launcher.drill.timeline import (
    PodLife,
    Records,
    Saw,
    recover,
    stood_still_s,
    what_was_seen,
)
from launcher.errors import ClusterError, ConfigError, RunFailed
from launcher.follow import follow
from launcher.kuberay import RUN_LABEL, RayjobApi
from launcher.platform import Platform
from launcher.reader import Folder, open_folder, worker_of
from launcher.submit import delete_and_wait, submit_run
from launcher.watch import HEAD_CONTAINER, Sight, head_pod, watch_run
from trainer.config import MAY_CHANGE, RUN_NAME_LIMIT, TrainerConfig

Object = dict[str, Any]
Say = Callable[[str], None]

EVERY_S = 5.0
SETTINGS = (f"checkpoint.every_s={EVERY_S:g}", "checkpoint.every_epochs=1000000")
"""A drill's run saves by the clock, so that what may be lost is known."""
STRIKE_AT = (0.25, 0.55)
"""Where in the run a random step lies."""
GONE_LIMIT_S = 120.0
POLL_S = 1.0
UNDISTURBED = "undisturbed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run, ready to be sent."""

    run: str
    config: TrainerConfig
    rayjob: Object

    @property
    def name(self) -> str:
        return str(self.rayjob["metadata"]["name"])


@dataclass(slots=True)
class Witness:
    """Notes what is to be seen of a run, each with its time by the clock of the pods."""

    offset_s: float = 0.0
    seen: list[Saw] = field(default_factory=list)
    pods: dict[str, PodLife] = field(default_factory=dict)
    clusters: set[str] = field(default_factory=set)

    def now(self) -> float:
        return time.time() + self.offset_s

    def note_sight(self, sight: Sight) -> None:
        step = None if sight.progress is None else int(sight.progress["step"])
        self.seen.append(Saw(time=self.now(), phase=sight.phase, message=sight.message, step=step))

    def follow_pods(self, cluster: Cluster, run: str) -> None:
        """In a thread of its own, for as long as the program lasts."""
        labels = {RUN_LABEL: run, "ray.io/is-ray-node": "yes"}
        for pods in follow(cluster, "Pod", labels):
            for pod in pods.values():
                self._note_pod(pod)

    def _note_pod(self, pod: Object) -> None:
        metadata, status = pod["metadata"], pod.get("status", {})
        name, now = metadata["name"], self.now()
        self.clusters.add(metadata["labels"].get("ray.io/cluster", ""))
        life = self.pods.get(name) or PodLife(
            name=name, kind=metadata["labels"]["ray.io/node-type"], created=now
        )
        states = [each["state"] for each in status.get("containerStatuses", [])]
        if life.started is None and any("running" in state for state in states):
            life = replace(life, started=now)
        ready = [each["status"] for each in status.get("conditions", []) if each["type"] == "Ready"]
        if life.ready is None and ready == ["True"]:
            life = replace(life, ready=now)
        self.pods[name] = life


def drill_name(run: str, scenario: str) -> str:
    """`<run>-drill-<scenario>`, and the run's name is cut where that is too long."""
    suffix = f"-{scenario}" if scenario == UNDISTURBED else f"-drill-{scenario}"
    return run[: RUN_NAME_LIMIT - len(suffix)].rstrip("-") + suffix


class Kept(Protocol):
    """What is needed of a run's folder."""

    def files(self) -> list[str]: ...
    def read(self, file: str) -> str | None: ...
    def sum(self, file: str) -> str | None: ...


def weights_of(folder: Kept, config: TrainerConfig) -> str | None:
    """SHA-256 of the weights of a finished run that learnt just this; None where there is none."""
    run, summary = folder.read("run.json"), folder.read("summary.json")
    if run is None or summary is None or json.loads(summary)["outcome"] != "succeeded":
        return None
    return folder.sum("model.pt") if _learnt(json.loads(run)) == _learnt(_plain(config)) else None


def _plain(config: TrainerConfig) -> Object:
    return config.model_dump(mode="json")


def _learnt(config: Object) -> Object:
    """What decides the bits of the weights."""
    learnt = {
        section: {key: value for key, value in config[section].items() if key not in free}
        for section, free in MAY_CHANGE.items()
    }
    return learnt | {"epochs": config["train"]["epochs"], "scaling": config["scaling"]}


def train_undisturbed(cluster: Cluster, platform: Platform, job: Job, say: Say) -> str:
    """SHA-256 of the weights of the run that nobody strikes; it is trained unless that was done before."""
    with open_folder(cluster, platform, job.run) as folder:
        weights = weights_of(folder, job.config)
        if weights is None:
            folder.set_aside()
    if weights is not None:
        say(f"run {job.run} was trained before: its weights are compared with")
        return weights
    rayjobs = RayjobApi(cluster)
    say(f"run {job.run} is trained first, to compare the weights with")
    submit_run(rayjobs, job.rayjob, lambda: None)
    *_, last = watch_run(cluster, job.name, job.run)
    if last.phase != "succeeded":
        raise RunFailed(
            f"run {job.run}, which nobody has struck, has {last.phase}",
            f"`trainyard explain {job.run} -n {cluster.namespace}` says why.",
        )
    delete_and_wait(rayjobs, job.name)
    with open_folder(cluster, platform, job.run) as folder:
        weights = weights_of(folder, job.config)
    if weights is None:
        raise RunFailed(f"run {job.run} has succeeded, and left no model.pt")
    return weights


def run_drill(
    cluster: Cluster,
    platform: Platform,
    job: Job,
    scenario: Scenario,
    *,
    weights: str,
    at_step: int | None = None,
    seed: int = 0,
    keep: bool = False,
    say: Say,
) -> Report:
    """Submit the run, strike it, follow it to its end, and clear up.

    Without a step a random one is taken, from the seed. Raises ConfigError if the run ends before.
    """
    rayjobs = RayjobApi(cluster)
    with open_folder(cluster, platform, job.run) as folder:
        if (aside := folder.set_aside()) is not None and not keep:
            folder.sibling(aside).delete()
    witness = Witness()
    threading.Thread(target=witness.follow_pods, args=(cluster, job.run), daemon=True).start()
    submit_run(rayjobs, job.rayjob, lambda: None)
    say(f"RayJob {cluster.namespace}/{job.name} created; training is awaited")
    drill = _Drill(cluster, platform, job, scenario, witness, say)
    try:
        last, struck, step = drill.follow(at_step, random.Random(f"{seed} {scenario.name}"))
    finally:
        delete_and_wait(rayjobs, job.name)
    left = left_behind(cluster, job.run, witness.clusters)
    with open_folder(cluster, platform, job.run) as folder:
        records = read_records(folder)
        left += left_in_folder(folder)
        found = folder.sum("model.pt") if last.phase == "succeeded" else None
        if not keep:
            folder.delete()
    pods = list(witness.pods.values())
    recovery = recover(records, pods, witness.seen, struck)
    report = Report(
        scenario=scenario.name,
        run=job.run,
        is_recovered=last.phase == "succeeded",
        why_not="" if last.phase == "succeeded" else f"{last.phase}: {last.message}".rstrip(": "),
        struck_at_step=step,
        recovery=recovery,
        attempts=len(records.attempts),
        worker_groups=len({(each["attempt"], each["group"]) for each in records.starts}),
        has_equal_weights=found == weights if found is not None else None,
        left_behind=left,
        seen=what_was_seen(witness.seen, struck),
        stood_still_s=round(stood_still_s(witness.seen, struck), 1),
    )
    return replace(report, missed=missed(report, scenario, job.config.checkpoint.every_s))


def read_records(folder: Folder) -> Records:
    return Records(
        attempts=folder.records("attempts.jsonl"),
        starts=folder.records("starts.jsonl"),
        failures=folder.records("failures.jsonl"),
    )


class _Drill:
    """The time between a submission and its end."""

    def __init__(
        self,
        cluster: Cluster,
        platform: Platform,
        job: Job,
        scenario: Scenario,
        witness: Witness,
        say: Say,
    ) -> None:
        self.cluster = cluster
        self.platform = platform
        self.job = job
        self.scenario = scenario
        self.witness = witness
        self.say = say
        self.strike: Future[None] | None = None

    def follow(self, at_step: int | None, chance: random.Random) -> tuple[Sight, float, int]:
        """The last sight, when the strike came, and at which step."""
        last: Sight | None = None
        aim: Future[Target] | None = None
        struck, step = 0.0, 0
        with ThreadPoolExecutor(1) as threads:
            for sight in self._sights():
                self.witness.note_sight(sight)
                last = sight
                if sight.progress is None or self.strike is not None:
                    continue
                step = int(sight.progress["step"])
                if at_step is None:
                    at_step = round(chance.uniform(*STRIKE_AT) * sight.progress["steps"])
                if aim is None and step > 0:
                    aim = threads.submit(self._aim)
                if aim is not None and aim.done() and step >= at_step:
                    target = aim.result()
                    self.say(f"strike at step {step}: {self.scenario.fault}")
                    struck = self.witness.now()
                    self.strike = threads.submit(self.scenario.strike, target)
            if self.strike is None or last is None:
                raise ConfigError(
                    f"run {self.job.run} ended before it could be struck"
                    + ("" if at_step is None else f" at step {at_step}"),
                    "Give it more epochs (--set train.epochs=N), or strike earlier (--at-step N).",
                )
            self.strike.result()
        return last, struck, step

    def _sights(self) -> Iterator[Sight]:
        """What a user sees; where the strike takes the RayJob away, they watch the one that follows."""
        while True:
            try:
                yield from watch_run(self.cluster, self.job.name, self.job.run)
                return
            except RunFailed as error:
                if self.strike is None:
                    raise
                self.witness.seen.append(
                    Saw(time=self.witness.now(), phase="stopped", message=error.what)
                )
                self.strike.result()

    def _aim(self) -> Target:
        """Where everything of the run is now, and what its pods' clocks say."""
        job = RayjobApi(self.cluster).get_job(self.job.name)
        head = None if job is None else head_pod(self.cluster, job["status"]["rayClusterName"])
        if head is None:
            raise ClusterError(f"run {self.job.run} has no head while it trains")
        workers = Folder(self.cluster, self.platform, self.job.run, head, HEAD_CONTAINER).workers()
        target = Target(
            cluster=self.cluster,
            run=self.job.run,
            job=self.job.name,
            head=head,
            workers=[
                worker_of(self.cluster, self.job.run, workers, rank) for rank in range(len(workers))
            ],
            processes=[each["process"] for each in workers],
            resubmit=lambda: _submit(self.cluster, self.job),
            say=self.say,
        )
        before = time.time()
        clock = float(target.inside(head, HEAD_CONTAINER, "date", "+%s.%N"))
        self.witness.offset_s = clock - (before + time.time()) / 2
        return target


def _submit(cluster: Cluster, job: Job) -> None:
    submit_run(RayjobApi(cluster), job.rayjob)


def left_behind(cluster: Cluster, run: str, ray_clusters: set[str]) -> list[str]:
    """Objects of a run whose RayJob is gone, after the time that Kubernetes takes to collect them."""
    deadline = time.monotonic() + GONE_LIMIT_S
    while True:
        left = [
            f"{kind} {each['metadata']['name']}"
            for kind in ("Pod", "RayCluster")
            for each in cluster.list(kind, {RUN_LABEL: run})
        ]
        left += [f"Secret {name}" for name in ray_clusters if name and cluster.get("Secret", name)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(POLL_S)


def left_in_folder(folder: Kept) -> list[str]:
    """A lease that was not given back, and files that nobody finished."""
    files = folder.files()
    left = [file for file in files if file.endswith(".aside")]
    claims = (re.fullmatch(r"lease/a(\d+)\.json", file) for file in files)
    newest = max((int(claim[1]) for claim in claims if claim), default=0)
    if newest and f"lease/a{newest}.ended" not in files:
        left.append(f"the lease of attempt {newest}")
    return left
