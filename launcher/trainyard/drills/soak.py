"""A soak: inject faults into a run repeatedly, and compare its weights with those of an undisturbed run.

The run trains in rounds. When a round has succeeded and time is left, the run is submitted again with more
epochs; when the time is over, no more faults are injected. As many epochs are trained without faults,
afterwards or at the same time: equal weights prove that all samples were used equally often and in the same
order.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from trainyard.cluster.cluster import Cluster
from trainyard.cluster.kuberay import RayjobApi
from trainyard.drills.drill import (
    clear_folder,
    has_even_epochs,
    left_behind,
    left_in_folder,
    read_records,
)
from trainyard.drills.drill_run import DrillJob, DrillRecorder, DrillRun, Say
from trainyard.drills.scenarios import LAUNCHER_ROLE, SCENARIOS, Scenario
from trainyard.drills.soak_report import RunSize, SoakReport, SoakStrike, growth
from trainyard.drills.strikes import CGROUP, Strike, Target
from trainyard.drills.timeline import steps_lost
from trainyard.drills.undisturbed import UNDISTURBED, TrainedBeside, train_undisturbed
from trainyard.errors import LauncherError
from trainyard.platform import Platform
from trainyard.submission.current_status import HEAD_CONTAINER
from trainyard.submission.run_folder.reader_pod import open_folder
from trainyard.submission.run_folder.remote_folder import RemoteFolder
from trainyard.submission.status import RunStatus
from trainyard.submission.submit import delete_and_wait, submit_rayjob
from trainyard_trainer.run_files import names

Object = dict[str, Any]

SOAK = "soak"
"""The suffix of the name of a soak's run."""

SOAK_UNDISTURBED = f"{SOAK}-{UNDISTURBED}"
"""The suffix of the name of the run without faults."""

PAUSE_S = (60.0, 180.0)
"""The range of seconds between two faults. The next fault waits until the run has recovered."""


def without_repeats(scenarios: Iterable[Scenario]) -> tuple[Scenario, ...]:
    """Return the scenario of each fault with the fewest settings: others inject it into a special run."""
    plainest: dict[Strike, Scenario] = {}
    for scenario in sorted(scenarios, key=lambda each: len(each.settings)):
        plainest.setdefault(scenario.strike, scenario)
    return tuple(plainest.values())


STRIKES = without_repeats(each for each in SCENARIOS.values() if each.rights == LAUNCHER_ROLE)
"""The faults of a soak, each once: those that need no rights beyond the chart's Role."""

ENDLESS = 1000
"""The number of retries, which no soak reaches."""

SETTINGS = (
    f"faults.retries={ENDLESS}",
    f"faults.worker_failures={ENDLESS}",
    "train.schedule={name: constant}",
    *(setting for each in STRIKES for setting in each.settings),
)
"""Settings of a soak's run: unlimited retries, a learning rate that does not depend on the epochs, and what
a fault needs. Everything else is the user's: the soak is about the run that will be trained."""

MEMORY = CGROUP + "print(held_bytes())"
"""A Python program that prints the memory of the processes of a container in bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakOptions:
    """How long a soak lasts, and how."""

    epochs: int
    """The number of epochs of a round."""
    minutes: float
    """The time in which faults are injected."""
    seed: int
    """The seed for the order and the times of the faults."""
    is_beside: bool = False
    """Whether the undisturbed run is trained at the same time, round by round. Otherwise it follows, and
    takes as long as all rounds together without faults."""
    keep: bool = False
    """Whether the folder of the run is kept."""


def soak_run(
    cluster: Cluster,
    platform: Platform,
    make_job: Callable[[str, int], DrillJob],
    options: SoakOptions,
    *,
    say: Say,
    known: Callable[[SoakReport], None],
) -> SoakReport:
    """Train rounds while faults are injected, and compare the weights with those of an undisturbed run.

    `make_job` creates the job for a suffix of the run's name and a number of epochs. `known` is called with
    the report before the weights are compared.
    """
    run = make_job(SOAK, options.epochs).run
    clear_folder(cluster, platform, run, keep=options.keep)
    soak = _Soak(cluster, platform, DrillRecorder.of(cluster, run), options, say)
    with closing(TrainedBeside(cluster, platform)) as beside:

        def begin_round(number: int) -> DrillJob:
            if options.is_beside:
                beside.train(make_job(SOAK_UNDISTURBED, number * options.epochs))
            return make_job(SOAK, number * options.epochs)

        rounds, why_not = soak.train_rounds(begin_round)
        report, weights = soak.report(run, rounds, why_not)
        known(report)
        if weights is not None:
            undisturbed = (
                beside.weights()
                if options.is_beside
                else train_undisturbed(
                    cluster, platform, make_job(SOAK_UNDISTURBED, report.epochs), say
                )
            )
            report = replace(report, has_equal_weights=weights == undisturbed)
    if not options.keep:
        with open_folder(cluster, platform, run) as folder:
            folder.delete()
    return report


def goodput_of(summary: str | None) -> float | None:
    """Return the goodput that summary.json tells, from 0 to 1; None without one."""
    found = json.loads(summary or "{}").get("goodput")
    return None if found is None else float(found["share"])


def in_turn(chance: random.Random) -> Iterator[Scenario]:
    """Yield scenarios forever: all of them in a random order, then all in another order, and so on."""
    while True:
        yield from chance.sample(STRIKES, len(STRIKES))


@dataclass(slots=True)
class _Soak:
    """The state of a soak: injects faults into the rounds, and records them."""

    cluster: Cluster
    platform: Platform
    recorder: DrillRecorder
    options: SoakOptions
    say: Say
    strikes: list[SoakStrike] = field(default_factory=list)
    sizes: list[RunSize] = field(default_factory=list)
    step: int = 0
    _chance: random.Random = field(init=False)
    _turns: Iterator[Scenario] = field(init=False)
    _began: float | None = None
    """When the first step was seen: a slow start takes nothing of the time of the soak."""
    _next_s: float = 0.0
    """When the next fault is due. The first one strikes at once."""

    def __post_init__(self) -> None:
        self._chance = random.Random(self.options.seed)
        self._turns = in_turn(self._chance)

    @property
    def after_s(self) -> float:
        """The time since the first step in seconds; 0 before it."""
        return 0.0 if self._began is None else time.monotonic() - self._began

    @property
    def limit_s(self) -> float:
        """The time of the soak in seconds."""
        return 60 * self.options.minutes

    @property
    def is_over(self) -> bool:
        """Whether the time of the soak is over."""
        return self.after_s > self.limit_s

    def train_rounds(self, begin_round: Callable[[int], DrillJob]) -> tuple[int, str]:
        """Train rounds until the time is over or one fails; return their number, and why the last one failed.

        `begin_round` returns the job of a round, which are numbered from 1 on.
        """
        rayjobs = RayjobApi(self.cluster)
        rounds, why_not = 0, ""
        while not why_not and (rounds == 0 or not self.is_over):
            rounds += 1
            job = begin_round(rounds)
            submit_rayjob(rayjobs, job.rayjob)
            upto = job.config.train.epochs
            self.say(
                f"round {rounds}: RayJob {self.cluster.namespace}/{job.name} trains up to epoch {upto}"
            )
            try:
                last = self.follow(job)
                why_not = "" if last.phase == "succeeded" else f"{last.phase}: {last.message}"
            finally:
                delete_and_wait(rayjobs, job.name)
        return rounds, why_not

    def report(self, run: str, rounds: int, why_not: str) -> tuple[SoakReport, str | None]:
        """Return what the rounds have shown, and the SHA-256 of the weights; None if a round has failed."""
        left = left_behind(self.cluster, run, self.recorder.clusters)
        epochs = rounds * self.options.epochs
        with open_folder(self.cluster, self.platform, run) as folder:
            records = read_records(folder)
            left += left_in_folder(folder)
            weights = None if why_not else folder.sum(names.MODEL)
            is_even = has_even_epochs(folder.records(names.METRICS), epochs)
            goodput = goodput_of(folder.read(names.SUMMARY))
        report = SoakReport(
            run=run,
            minutes=self.options.minutes,
            seed=self.options.seed,
            epochs=epochs,
            steps=self.step,
            rounds=rounds,
            attempts=len(records.attempts),
            worker_groups=records.worker_groups,
            strikes=self.strikes,
            steps_lost=steps_lost(records, 0.0),
            goodput=goodput,
            why_not=why_not,
            has_equal_weights=None,
            has_even_epochs=is_even,
            left_behind=left,
            sizes=self.sizes,
            grown=growth(self.sizes),
        )
        return report, weights

    def follow(self, job: DrillJob) -> RunStatus:
        """Follow a round to its end, and return the last status."""
        drill_run = DrillRun(self.cluster, self.platform, job, self.recorder, self.say)
        struck_at = self.step
        last: RunStatus | None = None
        with ThreadPoolExecutor(1) as threads:
            for last in drill_run.statuses():
                if drill_run.strike is not None and drill_run.strike.done():
                    drill_run.strike.result()
                    drill_run.strike = None
                if last.phase != "running" or last.progress is None or drill_run.strike is not None:
                    continue
                self.step = int(last.progress["step"])
                if self._began is None:
                    self._began = time.monotonic()
                if self._next_s <= self.after_s < self.limit_s and self.step > struck_at:
                    struck_at = self.step
                    scenario = next(self._turns)
                    drill_run.strike = threads.submit(self._strike, drill_run, scenario, self.step)
                    self._next_s = self.after_s + self._chance.uniform(*PAUSE_S)
            if drill_run.strike is not None:
                drill_run.strike.result()
        assert last is not None
        return last

    def _strike(self, drill_run: DrillRun, scenario: Scenario, step: int) -> None:
        after_s, why_not = self.after_s, ""
        try:
            target = drill_run.locate_target()
            self.sizes.append(self._measure(target))
            self.say(f"{after_s / 60:.1f} min, step {step}: {scenario.fault}")
            scenario.strike(target)
        except LauncherError as error:
            why_not = error.what
            self.say(f"fault {scenario.name} could not be injected: {why_not}")
        self.strikes.append(
            SoakStrike(after_s=after_s, step=step, scenario=scenario.name, why_not=why_not)
        )

    def _measure(self, target: Target) -> RunSize:
        folder = RemoteFolder(self.cluster, self.platform, target.run, target.head, HEAD_CONTAINER)
        files = folder.sizes()
        checkpoints = sum(
            size for file, size in files.items() if file.startswith(f"{names.CHECKPOINTS}/")
        )
        ask = ("python", "-c", MEMORY)
        return RunSize(
            after_s=self.after_s,
            head_bytes=int(target.inside(target.head, HEAD_CONTAINER, *ask)),
            worker_bytes=max(
                int(target.in_worker(rank, *ask)) for rank in range(len(target.workers))
            ),
            checkpoint_bytes=checkpoints,
            other_bytes=sum(files.values()) - checkpoints,
        )
