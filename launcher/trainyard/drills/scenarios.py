"""The catalogue of drills: each fault, the rights that it needs, and the limits for the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trainyard.drills import strikes
from trainyard.drills.strikes import Strike

WORKER_S = 45.0
"""The limit in seconds from the time at which the loss of a worker is noticed until training continues."""

HEAD_S = 150.0
"""The same limit for a fault that also ends the driver."""

LAUNCHER_ROLE = "the chart's Role"
"""The text for faults that need no rights beyond the Role for users of the launcher."""

KEEP_STATE = ("train.strategy=fsdp2", "faults.keep_state=true")
"""Settings of a run whose workers have shards, and keep their newest state in memory."""

REPLACE = ("faults.replace_workers=true",)
"""The setting of a run that replaces a lost worker while the others keep their state."""

HANG_S = 20
"""The value of `faults.hang_timeout_s` in the drills of a hanging worker, in seconds."""

LEAVE = "its workers train until its grace period ends, save and leave; then a new pod is created"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A kind of fault, and the limits that a run must meet after it."""

    name: str
    fault: str
    """The description of the fault."""
    answer: str
    """The description of the recovery."""
    actor: str
    """The component that makes the run recover."""
    rights: str
    """The rights that are needed to inject the fault."""
    strike: Strike = field(repr=False)
    within_s: float
    """The limit in seconds from the time at which the fault is noticed until training continues."""
    lasts_s: float = 0.0
    """The seconds for which the fault prevents workers from starting, in addition to `within_s`."""
    has_notice: bool = False
    """Whether workers are notified before the fault, so that no step may be lost."""
    steps_lost: int | None = None
    """The greatest number of steps that may be lost; None if the time between checkpoints is the limit."""
    restarts: Literal["always", "maybe", "never", "one"] = "always"
    """Whether workers must restart. With "never", training must continue during and after the fault, and with
    "one" only the lost worker may start anew."""
    stands_still_s: float = 0.0
    """The minimum time in seconds for which training must stand still; otherwise the fault had no effect."""
    settings: Sequence[str] = ()
    """The keys of the run file that the drill sets."""


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="worker-killed",
            fault="a worker process is killed (SIGKILL)",
            answer="the worker group restarts in the same pods",
            actor="Ray Train",
            rights=LAUNCHER_ROLE,
            strike=strikes.kill_worker,
            within_s=WORKER_S,
        ),
        Scenario(
            name="worker-killed-replaced",
            fault="a worker process is killed (SIGKILL); DDP with `faults.replace_workers`",
            answer="another process in the same pod takes its place, and the other worker keeps its state",
            actor="Ray Train, trainer",
            rights=LAUNCHER_ROLE,
            strike=strikes.kill_worker,
            within_s=WORKER_S,
            steps_lost=0,
            restarts="one",
            settings=REPLACE,
        ),
        Scenario(
            name="worker-lost-replaced",
            fault="a worker's pod disappears at once, with all its processes; DDP with "
            "`faults.replace_workers`",
            answer="a new pod is created, a process there takes the place of the lost worker, and the other "
            "one keeps its state",
            actor="KubeRay, Ray Train, trainer",
            rights=LAUNCHER_ROLE,
            strike=strikes.lose_worker_pod,
            within_s=WORKER_S,
            steps_lost=0,
            restarts="one",
            settings=REPLACE,
        ),
        Scenario(
            name="worker-lost-spare",
            fault="a worker's pod disappears at once, with all its processes; DDP with "
            "`faults.replace_workers` and `faults.spares: 1`",
            answer="a process in the spare pod takes the place of the lost worker, and the other one keeps "
            "its state",
            actor="Ray Train, trainer",
            rights=LAUNCHER_ROLE,
            strike=strikes.lose_worker_pod,
            within_s=WORKER_S,
            steps_lost=0,
            restarts="one",
            settings=(*REPLACE, "faults.spares=1"),
        ),
        Scenario(
            name="worker-killed-kept",
            fault="a worker process is killed (SIGKILL); FSDP2 with `faults.keep_state`",
            answer="the worker group restarts in the same pods, from the state in their memory",
            actor="Ray Train, trainer",
            rights=LAUNCHER_ROLE,
            strike=strikes.kill_worker,
            within_s=WORKER_S,
            steps_lost=1,
            settings=KEEP_STATE,
        ),
        Scenario(
            name="worker-lost-kept",
            fault="a worker's pod disappears at once, with all its processes; FSDP2 with `faults.keep_state`",
            answer="a new pod is created, and the worker group restarts from the state in the memory of the "
            "others",
            actor="KubeRay, Ray Train, trainer",
            rights=LAUNCHER_ROLE,
            strike=strikes.lose_worker_pod,
            within_s=WORKER_S,
            steps_lost=2,
            settings=KEEP_STATE,
        ),
        Scenario(
            name="worker-deleted",
            fault="a worker's pod is deleted",
            answer=LEAVE,
            actor="KubeRay, trainer",
            rights=LAUNCHER_ROLE,
            strike=strikes.delete_worker_pod,
            within_s=WORKER_S,
            has_notice=True,
        ),
        Scenario(
            name="worker-lost",
            fault="a worker's pod disappears at once, with all its processes",
            answer="a new pod is created, and the worker group restarts",
            actor="KubeRay, Ray Train",
            rights=LAUNCHER_ROLE,
            strike=strikes.lose_worker_pod,
            within_s=WORKER_S,
        ),
        Scenario(
            name="worker-evicted",
            fault="a worker's pod is evicted",
            answer=LEAVE,
            actor="KubeRay, trainer",
            rights="create pods/eviction",
            strike=strikes.evict_worker_pod,
            within_s=WORKER_S,
            has_notice=True,
        ),
        Scenario(
            name="worker-hangs",
            fault="a worker process hangs (SIGSTOP)",
            answer="its process is ended after `faults.hang_timeout_s` (here 20 s); then the worker group "
            "restarts",
            actor="trainer, Ray Train",
            rights=LAUNCHER_ROLE,
            strike=strikes.stop_worker,
            within_s=WORKER_S,
            settings=(f"faults.hang_timeout_s={HANG_S}",),
        ),
        Scenario(
            name="worker-hangs-replaced",
            fault="a worker process hangs (SIGSTOP); DDP with `faults.replace_workers`",
            answer="its process is ended after `faults.hang_timeout_s` (here 20 s), another process in the "
            "same pod takes its place, and the other worker keeps its state",
            actor="trainer, Ray Train",
            rights=LAUNCHER_ROLE,
            strike=strikes.stop_worker,
            within_s=WORKER_S,
            steps_lost=0,
            restarts="one",
            settings=(*REPLACE, f"faults.hang_timeout_s={HANG_S}"),
        ),
        Scenario(
            name="worker-oom",
            fault="a worker is killed because memory is exhausted",
            answer="the worker group restarts",
            actor="Ray Train",
            rights=LAUNCHER_ROLE,
            strike=strikes.exhaust_worker,
            within_s=WORKER_S,
        ),
        Scenario(
            name="worker-oom-by-ray",
            fault="a worker's pod has 96 % of its memory in use, and Ray kills the worker",
            answer="the worker group restarts in the same pods",
            actor="trainer",
            rights=LAUNCHER_ROLE,
            strike=strikes.crowd_worker,
            within_s=WORKER_S,
        ),
        Scenario(
            name="head-deleted",
            fault="the head's pod is deleted",
            answer="the workers save; a new head is created, and the job starts there again",
            actor="KubeRay, trainer",
            rights=LAUNCHER_ROLE,
            strike=strikes.delete_head_pod,
            within_s=HEAD_S,
            has_notice=True,
        ),
        Scenario(
            name="head-lost",
            fault="the head's pod disappears at once, with all its processes",
            answer="a new head is created, and the job starts there again",
            actor="KubeRay, trainer",
            rights=LAUNCHER_ROLE,
            strike=strikes.lose_head_pod,
            within_s=HEAD_S,
        ),
        Scenario(
            name="driver-killed",
            fault="the driver is killed (SIGKILL)",
            answer="another attempt starts on a new cluster (`faults.retries`)",
            actor="KubeRay, trainer",
            rights=LAUNCHER_ROLE,
            strike=strikes.kill_driver,
            within_s=HEAD_S,
        ),
        Scenario(
            name="head-oom",
            fault="memory on the head is exhausted, and the kernel kills processes there: the driver, "
            "then others of Ray",
            answer="the job has failed; another attempt starts on a new cluster (`faults.retries`)",
            actor="KubeRay, trainer",
            rights=LAUNCHER_ROLE,
            strike=strikes.exhaust_head,
            within_s=HEAD_S,
        ),
        Scenario(
            name="node-drained",
            fault="the node of a worker is drained, and uncordoned when it is empty",
            answer="the workers save; new pods are created where there is a node",
            actor="KubeRay, trainer",
            rights="patch nodes, create pods/eviction",
            strike=strikes.drain_node,
            within_s=HEAD_S,
            has_notice=True,
        ),
        Scenario(
            name="suspended",
            fault="the run is suspended and resumed",
            answer="the workers save, the cluster is deleted; a new one resumes from there",
            actor="you, by resuming it",
            rights=LAUNCHER_ROLE,
            strike=strikes.suspend_and_resume,
            within_s=HEAD_S,
            has_notice=True,
        ),
        Scenario(
            name="resubmitted",
            fault="the RayJob is deleted, and the run submitted again",
            answer="the workers save, the cluster is deleted; a new one resumes from there",
            actor="you, by submitting it",
            rights=LAUNCHER_ROLE,
            strike=strikes.delete_and_submit,
            within_s=HEAD_S,
            has_notice=True,
        ),
    )
}
