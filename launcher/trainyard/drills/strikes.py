"""What is done to a run in a drill. Each strike gets its target, and may take as long as its fault lasts."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainyard.cluster.kuberay import RayjobApi
from trainyard.errors import ClusterError
from trainyard.labels import RUN_LABEL
from trainyard.submission.control import resume_job, suspend_job
from trainyard.submission.current_status import HEAD_CONTAINER
from trainyard.submission.status import phase_of
from trainyard.submission.submit import delete_and_wait
from trainyard.submission.workers import WorkerLocation

if TYPE_CHECKING:
    from trainyard.cluster.cluster import Cluster

Object = dict[str, Any]

POLL_S = 0.5
GONE_LIMIT_S = 180.0

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
"""Prints the ids of processes that were started with these words, the first one without its folder."""

DRIVER = ("python", "-m", "trainyard_trainer")
"""As the entrypoint of a RayJob starts it."""
SERVER = ("gcs_server",)
"""Ray's own, on the head."""

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
"""How a container's own Python learns how many bytes its processes hold of their own; of cgroup v2 and v1."""

HOG = (
    CGROUP
    + """
import sys, time
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
for victim in victims:
    pathlib.Path(f"/proc/{victim}/oom_score_adj").write_text("1000")
held = []
deadline = time.monotonic() + 30
while time.monotonic() < deadline and all(pathlib.Path(f"/proc/{v}").exists() for v in victims):
    share = used_bytes() / int(limit)
    peak = max(peak, share)
    try:
        if share < float(most):
            held.append(b"x" * 2**24)
            continue
    except MemoryError:
        pass
    time.sleep(0.1)
if time.monotonic() >= deadline:
    sys.exit(f"nobody was killed within 30 s, with {peak:.0%} of the memory in use")
print(kills() - before, peak)
"""
)
"""Takes memory, up to a share of the container's limit, until the processes that are named are gone: the
kernel chooses them first.

Prints how many processes of the container the kernel has killed for want of memory meanwhile, and which share
of its limit was in use at most, as Ray counts it: who is killed gives theirs back before they are gone.
"""

KILLED = 128 + signal.SIGKILL
"""Exit code of a process in a container that was killed, as the kernel does it and a container's end."""

SHORT_SHARE = 0.9
"""Of a container's limit. Ray kills a worker when 95 % are in use, if it looks before the kernel has to:
https://docs.ray.io/en/latest/ray-core/scheduling/ray-oom-prevention.html"""
RAY_S_SHARE = 0.96
"""Ray has to kill, and the kernel has not."""
ALL = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A run under way, and the means to strike it."""

    cluster: Cluster
    run: str
    job: str
    """Its RayJob."""
    head: str
    """Its head pod."""
    workers: Sequence[WorkerLocation]
    """By rank."""
    processes: Sequence[int]
    """Of the workers, each in its pod."""
    resubmit: Callable[[], None]
    """Submits the run again."""
    say: Callable[[str], None]

    @property
    def rayjobs(self) -> RayjobApi:
        return RayjobApi(self.cluster)

    def inside(self, pod: str, container: str, *command: str) -> str:
        """What a command in a pod says. Raises ClusterError if it fails."""
        with self.cluster.execute(pod, container, command) as process:
            said = b"".join(data for _, data in process.output()).decode(errors="replace")
            if process.exit_code != 0:
                raise ClusterError(
                    f"`{command[0]}` in pod {pod} failed ({process.exit_code})",
                    *said.strip().splitlines()[-3:],
                )
        return said

    def process(self, pod: str, container: str, *words: str) -> str:
        """Id of the one process in a pod that was started so. Raises ClusterError."""
        found = self.inside(pod, container, "python", "-c", FIND, *words).split()
        if len(found) != 1:
            raise ClusterError(
                f"pod {pod} has {len(found)} processes `{' '.join(words)}`, not one: {found}"
            )
        return found[0]

    def in_worker(self, rank: int, *command: str) -> str:
        place = self.workers[rank]
        return self.inside(place.pod, place.container, *command)

    def pods(self) -> list[Object]:
        """The Ray pods of the run."""
        labels = {RUN_LABEL: self.run, "ray.io/is-ray-node": "yes"}
        return self.cluster.list("Pod", labels)


Strike = Callable[[Target], None]


def kill_worker(target: Target) -> None:
    target.in_worker(_last(target), "sh", "-c", f"kill -KILL {target.processes[_last(target)]}")


def stop_worker(target: Target) -> None:
    """It neither ends nor answers."""
    target.in_worker(_last(target), "sh", "-c", f"kill -STOP {target.processes[_last(target)]}")


def exhaust_worker(target: Target) -> None:
    """Of a container's processes the kernel takes Ray's workers first: so they are marked by Ray."""
    _hog_worker(target, ALL)


def crowd_worker(target: Target) -> None:
    """So much memory is in use that Ray kills the worker; the kernel could still go on."""
    _hog_worker(target, RAY_S_SHARE)


def delete_worker_pod(target: Target) -> None:
    """With the time that it asks for."""
    target.cluster.delete("Pod", target.workers[_last(target)].pod)


def lose_worker_pod(target: Target) -> None:
    """Without a word to its processes."""
    target.cluster.delete("Pod", target.workers[_last(target)].pod, grace_s=0)


def evict_worker_pod(target: Target) -> None:
    target.cluster.evict(target.workers[_last(target)].pod)


def delete_head_pod(target: Target) -> None:
    target.cluster.delete("Pod", target.head)


def lose_head_pod(target: Target) -> None:
    target.cluster.delete("Pod", target.head, grace_s=0)


def kill_driver(target: Target) -> None:
    driver = target.process(target.head, HEAD_CONTAINER, *DRIVER)
    target.inside(target.head, HEAD_CONTAINER, "sh", "-c", f"kill -KILL {driver}")


def exhaust_head(target: Target) -> None:
    """The kernel takes Ray's own server: with it the head's container ends, and starts again."""
    victim = target.process(target.head, HEAD_CONTAINER, *SERVER)
    _hog(target, target.head, HEAD_CONTAINER, ALL, victim)


def drain_node(target: Target) -> None:
    """As `kubectl drain` does it to the node of the last worker; afterwards it is open again."""
    pod = target.cluster.get("Pod", target.workers[_last(target)].pod)
    if pod is None:
        raise ClusterError("the worker's pod is gone before its node was drained")
    node = pod["spec"]["nodeName"]
    target.cluster.patch("Node", node, {"spec": {"unschedulable": True}})
    try:
        doomed = [each for each in target.pods() if each["spec"].get("nodeName") == node]
        names = [each["metadata"]["name"] for each in doomed]
        for name in names:
            target.cluster.evict(name)
        target.say(f"node {node}: closed, {len(names)} pods evicted")
        _wait_until(
            lambda: not {each["metadata"]["name"] for each in target.pods()} & set(names),
            f"the pods of node {node} are gone",
        )
    finally:
        target.cluster.patch("Node", node, {"spec": {"unschedulable": None}})
    target.say(f"node {node}: open again")


def suspend_and_resume(target: Target) -> None:
    suspend_job(target.cluster, _job(target))
    _wait_until(lambda: phase_of(_job(target)["status"]) == "suspended", "the run is suspended")
    _wait_until(lambda: not target.pods(), "its pods are gone")
    resume_job(target.cluster, _job(target))


def delete_and_submit(target: Target) -> None:
    """Without `trainyard stop`: its workers hear of it as its pods go."""
    delete_and_wait(target.rayjobs, target.job)
    target.resubmit()


def _job(target: Target) -> Object:
    job = target.rayjobs.get_job(target.job)
    if job is None:
        raise ClusterError(f"RayJob {target.job} is gone", reason="NotFound")
    return job


def _last(target: Target) -> int:
    """The last rank: the first one has the run's records in its hand."""
    return len(target.workers) - 1


def _hog_worker(target: Target, share: float) -> None:
    place, victim = target.workers[_last(target)], target.processes[_last(target)]
    _hog(target, place.pod, place.container, share, str(victim))


def _hog(target: Target, pod: str, container: str, most: float, *victims: str) -> None:
    """Raises ClusterError if nobody was killed for want of memory."""
    hog = ["python", "-c", HOG, str(most), *victims]
    with target.cluster.execute(pod, container, hog) as process:
        said = b"".join(data for _, data in process.output()).decode(errors="replace")
        if process.exit_code == KILLED:
            target.say(f"pod {pod}: the kernel has killed what took the memory, too")
            return
        if process.exit_code != 0:
            raise ClusterError(
                f"what was to take the memory of pod {pod} failed ({process.exit_code})",
                *said.strip().splitlines()[-1:],
            )
    kills, peak = said.split()
    if int(kills):
        target.say(f"pod {pod}: the kernel has killed for want of memory")
    elif float(peak) > SHORT_SHARE:
        target.say(f"pod {pod}: Ray has killed for want of memory, before the kernel had to")
    else:
        raise ClusterError(
            f"pod {pod}: nobody was killed for want of memory, with {float(peak):.0%} of it in use"
        )


def _wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + GONE_LIMIT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not within {GONE_LIMIT_S:g} s", reason="Timeout")
        time.sleep(POLL_S)
