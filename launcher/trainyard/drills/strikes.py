"""The faults of drills. Each function injects a fault, and returns when the fault is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainyard.cluster.kuberay import RayjobApi
from trainyard.errors import ClusterError
from trainyard.labels import RUN_LABEL
from trainyard.submission.control import resume_job, suspend_job
from trainyard.submission.current_status import HEAD_CONTAINER
from trainyard.submission.polling import comes_true
from trainyard.submission.status import phase_of
from trainyard.submission.submit import delete_and_wait
from trainyard.submission.workers import WorkerLocation
from trainyard_trainer.run_files.programs.isolation import IN_PODS

if TYPE_CHECKING:
    from trainyard.cluster.cluster import Cluster

Object = dict[str, Any]

POLL_S = 0.5
"""The interval in seconds at which a condition is polled."""

GONE_LIMIT_S = 180.0
"""The time limit in seconds for a condition, such as the end of pods."""

FIND = """
import pathlib, sys
wanted = sys.argv[1:]
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        program, *words = (process / "cmdline").read_text().split("\\0")
    except OSError:
        continue
    if [pathlib.Path(program).name, *words][: len(wanted)] == wanted:
        print(process.name)
"""
"""A Python program that prints the IDs of processes whose command line begins with the given words.

The first word is the name of the executable, without its folder.
"""

DRIVER = (*IN_PODS, "trainyard_trainer")
"""The command line of the driver."""

SERVER = ("gcs_server",)
"""The command line of Ray's control server on the head."""

CGROUP = """
import pathlib
V2, V1 = "/sys/fs/cgroup", "/sys/fs/cgroup/memory"
def read(*files):
    for file in map(pathlib.Path, files):
        if file.exists():
            return file.read_text()
def counts(*files):
    return dict(line.split() for line in read(*files).splitlines())
def memory():
    return counts(f"{V2}/memory.stat", f"{V1}/memory.stat")
def held_bytes():
    held = memory()
    return int(held.get("total_rss", held.get("anon")))
"""
"""Python functions that read the memory of a container's processes, for cgroup v2 and v1."""

HOG = (
    CGROUP
    + """
import os, sys, time
def lives(process):
    try:
        return bool(pathlib.Path(f"/proc/{process}/cmdline").read_bytes())  # a zombie has none
    except OSError:
        return False
def used_bytes():
    usage, held = read(f"{V2}/memory.current", f"{V1}/memory.usage_in_bytes"), memory()
    cached = (held.get(f"total_{key}", held[key]) for key in ("active_file", "inactive_file"))
    return int(usage) - sum(map(int, cached))
def kills():
    return int(counts(f"{V2}/memory.events", f"{V1}/memory.oom_control")["oom_kill"])
most, *victims = sys.argv[1:]
limit = read(f"{V2}/memory.max", f"{V1}/memory.limit_in_bytes").strip()
if limit == "max":
    sys.exit("the container has no memory limit")
before, peak = kills(), 0.0
group, score = (pathlib.Path("/proc/self", each).read_text() for each in ("cgroup", "oom_score_adj"))
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:  # Ray's workers have 1000 by themselves
        if (process / "cgroup").read_text() == group:
            (process / "oom_score_adj").write_text("1000" if process.name in victims else score)
    except OSError:
        pass  # it has ended
held, piece = os.memfd_create("hog"), b"x" * 2**24
deadline = time.monotonic() + 30
while time.monotonic() < deadline and all(map(lives, victims)):
    share = used_bytes() / int(limit)
    peak = max(peak, share)
    try:
        if share < float(most):
            os.write(held, piece)
            continue
    except OSError:
        pass
    time.sleep(0.1)
if time.monotonic() >= deadline:
    sys.exit(f"no process was killed within 30 s, with {peak:.0%} of the memory in use")
print(kills() - before, peak)
"""
)
"""A Python program that uses memory, up to a share of the container's limit, until some processes are killed.

It makes the kernel kill these processes first. Its own memory is in a file without a name, which counts for
the container and for no process: otherwise the kernel would kill the program, as the process that uses most.
It prints the number of processes that the kernel has killed, and the largest share of the limit that was in
use, as Ray computes it.
"""

SHORT_SHARE = 0.9
"""The share of a container's limit above which Ray may have killed a worker. Ray's threshold is 95 %:
https://docs.ray.io/en/latest/ray-core/scheduling/ray-oom-prevention.html"""

RAY_S_SHARE = 0.96
"""A share of a container's limit at which Ray kills a worker, but the kernel does not."""

ALL = 1.0
"""The whole limit of a container, at which the kernel kills processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """An active run, with everything that is needed to inject a fault into it."""

    cluster: Cluster
    run: str
    job: str
    """The name of its RayJob."""
    head: str
    """The name of its head pod."""
    workers: Sequence[WorkerLocation]
    """The location of each worker, by rank."""
    processes: Sequence[int]
    """The process ID of each worker in its pod, by rank."""
    resubmit: Callable[[], None]
    """A function that creates the RayJob of the run again."""
    say: Callable[[str], None]

    @property
    def rayjobs(self) -> RayjobApi:
        """The API for the RayJobs of the cluster."""
        return RayjobApi(self.cluster)

    def inside(self, pod: str, container: str, *command: str) -> str:
        """Run a command in a pod and return its output. Raises ClusterError if it fails."""
        with self.cluster.execute(pod, container, command) as process:
            said = b"".join(data for _, data in process.output()).decode(errors="replace")
            if process.exit_code != 0:
                raise ClusterError(
                    f"`{command[0]}` in pod {pod} failed ({process.exit_code})",
                    *said.strip().splitlines()[-3:],
                )
        return said

    def process(self, pod: str, container: str, *words: str) -> str:
        """Return the ID of the only process with this command line in a pod.

        Raises ClusterError if there is none or several.
        """
        found = self.inside(pod, container, "python", "-c", FIND, *words).split()
        if len(found) != 1:
            raise ClusterError(
                f"pod {pod} has {len(found)} processes `{' '.join(words)}` instead of one: {found}"
            )
        return found[0]

    def in_worker(self, rank: int, *command: str) -> str:
        """Run a command in the container of a worker and return its output."""
        place = self.workers[rank]
        return self.inside(place.pod, place.container, *command)

    def pods(self) -> list[Object]:
        """Return the Ray pods of the run."""
        labels = {RUN_LABEL: self.run, "ray.io/is-ray-node": "yes"}
        return self.cluster.list("Pod", labels)


Strike = Callable[[Target], None]


def kill_worker(target: Target) -> None:
    """Kill a worker process by SIGKILL."""
    target.in_worker(_last(target), "sh", "-c", f"kill -KILL {target.processes[_last(target)]}")


def stop_worker(target: Target) -> None:
    """Stop a worker process by SIGSTOP, so that it neither ends nor responds."""
    target.in_worker(_last(target), "sh", "-c", f"kill -STOP {target.processes[_last(target)]}")


def exhaust_worker(target: Target) -> None:
    """Use all memory of a worker's container, so that the kernel kills the worker."""
    _hog_worker(target, ALL)


def crowd_worker(target: Target) -> None:
    """Use so much memory of a worker's container that Ray kills the worker, but the kernel does not."""
    _hog_worker(target, RAY_S_SHARE)


def delete_worker_pod(target: Target) -> None:
    """Delete a worker's pod with its grace period."""
    target.cluster.delete("Pod", target.workers[_last(target)].pod)


def lose_worker_pod(target: Target) -> None:
    """Delete a worker's pod without a grace period."""
    target.cluster.delete("Pod", target.workers[_last(target)].pod, grace_s=0)


def evict_worker_pod(target: Target) -> None:
    """Evict the pod of a worker."""
    target.cluster.evict(target.workers[_last(target)].pod)


def delete_head_pod(target: Target) -> None:
    """Delete the head's pod with its grace period."""
    target.cluster.delete("Pod", target.head)


def lose_head_pod(target: Target) -> None:
    """Delete the head's pod without a grace period."""
    target.cluster.delete("Pod", target.head, grace_s=0)


def kill_driver(target: Target) -> None:
    """Kill the driver by SIGKILL."""
    driver = target.process(target.head, HEAD_CONTAINER, *DRIVER)
    target.inside(target.head, HEAD_CONTAINER, "sh", "-c", f"kill -KILL {driver}")


def exhaust_head(target: Target) -> None:
    """Use all memory of the head's container, so that the kernel kills Ray's processes there."""
    victim = target.process(target.head, HEAD_CONTAINER, *SERVER)
    _hog(target, target.head, HEAD_CONTAINER, ALL, victim)


def drain_node(target: Target) -> None:
    """Drain the node of the last worker as `kubectl drain` does, and make it schedulable again."""
    pod = target.cluster.get("Pod", target.workers[_last(target)].pod)
    if pod is None:
        raise ClusterError("the worker's pod disappeared before its node was drained")
    node = pod["spec"]["nodeName"]
    target.cluster.patch("Node", node, {"spec": {"unschedulable": True}})
    try:
        doomed = [each for each in target.pods() if each["spec"].get("nodeName") == node]
        names = [each["metadata"]["name"] for each in doomed]
        for name in names:
            target.cluster.evict(name)
        target.say(f"node {node}: cordoned, {len(names)} pods evicted")
        _wait_until(
            lambda: not {each["metadata"]["name"] for each in target.pods()} & set(names),
            f"the pods of node {node} have ended",
        )
    finally:
        target.cluster.patch("Node", node, {"spec": {"unschedulable": None}})
    target.say(f"node {node}: uncordoned")


def suspend_and_resume(target: Target) -> None:
    """Suspend the run, wait until its pods have ended, and resume it."""
    suspend_job(target.cluster, _job(target))
    _wait_until(lambda: phase_of(_job(target)["status"]) == "suspended", "the run is suspended")
    _wait_until(lambda: not target.pods(), "the pods of the run have ended")
    resume_job(target.cluster, _job(target))


def delete_and_submit(target: Target) -> None:
    """Delete the RayJob without `trainyard stop`, and submit the run again."""
    delete_and_wait(target.rayjobs, target.job)
    target.resubmit()


def _job(target: Target) -> Object:
    job = target.rayjobs.get_job(target.job)
    if job is None:
        raise ClusterError(f"RayJob {target.job} no longer exists", reason="NotFound")
    return job


def _last(target: Target) -> int:
    """Return the last rank. Rank 0 is spared because it writes the run's records."""
    return len(target.workers) - 1


def _hog_worker(target: Target, share: float) -> None:
    place, victim = target.workers[_last(target)], target.processes[_last(target)]
    _hog(target, place.pod, place.container, share, str(victim))


def _hog(target: Target, pod: str, container: str, most: float, *victims: str) -> None:
    """Run `HOG` in a container. Raises ClusterError if no process was killed."""
    hog = ["python", "-c", HOG, str(most), *victims]
    with target.cluster.execute(pod, container, hog) as process:
        said = b"".join(data for _, data in process.output()).decode(errors="replace")
        if process.exit_code != 0:
            raise ClusterError(
                f"the program that uses the memory of pod {pod} failed ({process.exit_code})",
                *said.strip().splitlines()[-1:],
            )
    kills, peak = said.split()
    if int(kills):
        target.say(f"pod {pod}: the kernel has killed a process because memory was exhausted")
    elif float(peak) > SHORT_SHARE:
        target.say(f"pod {pod}: Ray has killed a process because memory was almost exhausted")
    else:
        raise ClusterError(
            f"pod {pod}: no process was killed with {float(peak):.0%} of the memory in use"
        )


def _wait_until(is_so: Callable[[], bool], what: str) -> None:
    if not comes_true(is_so, limit_s=GONE_LIMIT_S, poll_s=POLL_S):
        raise ClusterError(f"not within {GONE_LIMIT_S:g} s: {what}", reason="Timeout")
