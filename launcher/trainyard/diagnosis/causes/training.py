"""Failures of training itself: divergence, GPUs, memory, data, and communication of the workers."""

from __future__ import annotations

import re

from trainyard.diagnosis.causes.driver_log import LOG, match_error, match_log
from trainyard.diagnosis.failure import Match, any_of, evidence, failure
from trainyard.diagnosis.snapshot import Snapshot
from trainyard_trainer.run_files.driver_output import PROGRESS, WORKER_HANGS, last_record, record_of

WORKERS_NAMED = 5
"""The number of slow workers that are shown."""


@failure(
    "diverged",
    seen="the driver's `error: the loss or a weight became NaN or infinite`",
    remedy="Lower train.optimizer.learning_rate, set train.clip_norm, or use precision fp32; the "
    "last good checkpoint is kept, and a changed config needs a new name (--name).",
)
def diverged(snapshot: Snapshot) -> Match | None:
    """The training diverged: the loss or a weight became NaN or infinite."""
    return match_error(snapshot, "became NaN or infinite")


@failure(
    "cuda-missing",
    seen="the driver's `error: CUDA is missing`",
    remedy="Install the NVIDIA driver, container toolkit and device plugin on the nodes it names,"
    " or train with resources.workers.",
)
def cuda_missing(snapshot: Snapshot) -> Match | None:
    """Nodes offer GPUs that torch cannot use."""
    return match_error(snapshot, "CUDA is missing|the check of the nodes' GPUs failed")


@failure(
    "ray-too-small",
    seen="the driver's `error: the Ray cluster is too small`",
    remedy="Ask for fewer workers (--gpus, --workers), or give the pool more CPUs per node: data "
    "needs one beside the workers.",
)
def ray_too_small(snapshot: Snapshot) -> Match | None:
    """The Ray cluster is too small for all workers."""
    return match_error(snapshot, "the Ray cluster is too small")


@failure(
    "gpu-memory",
    seen="`CUDA out of memory` in the driver's log",
    remedy="Set train.micro_batch_size lower (the global batch stays), or train.precision: bf16.",
)
def gpu_memory(snapshot: Snapshot) -> Match | None:
    """The model and its batch do not fit into a GPU's memory."""
    return match_log(
        snapshot,
        any_of("CUDA out of memory", "torch.OutOfMemoryError", "CUDNN_STATUS_ALLOC_FAILED"),
        "a GPU's memory is too small for the model and its batch",
    )


@failure(
    "shared-memory",
    seen="`Bus error`, or `No space left on device` for /dev/shm, in the driver's log",
    remedy="Raise memoryGib of the pool: /dev/shm is as large as the pod's memory and counts in "
    "it. A volume of your own on /dev/shm must be large enough.",
)
def shared_memory(snapshot: Snapshot) -> Match | None:
    """/dev/shm of a pod is too small (a bus error)."""
    return match_log(
        snapshot,
        any_of(
            "Bus error",
            "SIGBUS",
            "out of shared memory",
            "No space left on device.*/(dev/shm|torch_)",
            "(/dev/shm|torch_).*No space left on device",
            "shared memory segment .* failed",
        ),
        "/dev/shm of a pod is full: workers share batches and objects there",
    )


@failure(
    "too-many-bad-samples",
    seen="the driver's `error: ... samples that cannot be used`",
    remedy="Correct or remove the samples that the lines above name, or allow them with "
    "data.max_bad_samples.",
)
def too_many_bad_samples(snapshot: Snapshot) -> Match | None:
    """More samples cannot be used than data.max_bad_samples allows."""
    return match_error(snapshot, "samples that cannot be used")


@failure(
    "config-error",
    seen="exit code 2 of the driver: its `error: ...` names the key of the run file that is wrong",
    remedy="Change the run file as the lines say, and submit it again; no retry helps.",
)
def config_error(snapshot: Snapshot) -> Match | None:
    """The run file asks for something that is impossible."""
    if not re.search(r"failed with exit code 2\b", str(snapshot.status.get("message", ""))):
        return None
    return match_error(snapshot, "^error: ")


@failure(
    "nccl-timeout",
    seen="`Watchdog caught collective operation timeout`, NCCL errors in the driver's log",
    remedy="Find the worker that stopped answering (`trainyard logs {run} -n {namespace}`). If all hang "
    "from the first step, name the network's interface (network.interface) or preset "
    "(network.preset), and set network.debug: true.",
)
def nccl_timeout(snapshot: Snapshot) -> Match | None:
    """A collective operation timed out: the network between the workers, or one worker that hangs."""
    return match_log(
        snapshot,
        any_of(
            "Watchdog caught collective operation timeout",
            "NCCL (error|WARN)",
            "ncclSystemError",
            "ncclRemoteError",
            "ncclInternalError",
            "DistBackendError",
            "Timed out waiting .*ms for (recv|send)",
        ),
        "a collective operation of the workers failed or timed out (NCCL or Gloo)",
    )


@failure(
    "worker-hangs",
    seen="`worker ... on ... hangs` in the driver's log, and no `progress` line after it",
    remedy="Nothing, the first time: its process is ended after faults.hang_timeout_s, and the run goes on. "
    "The lines after it in the log (`trainyard logs {run} -n {namespace}`) say where in the code the worker "
    "is; there are none if it does not answer. If workers always hang at the same place, look at that code; "
    "if always on one node, drain that node.",
)
def worker_hangs(snapshot: Snapshot) -> Match | None:
    """A worker does not move any more, and the others wait for it."""
    if snapshot.phase != "running":
        return None
    for line in reversed(snapshot.log.splitlines()):
        if record_of(line, PROGRESS) is not None:
            return None
        if found := WORKER_HANGS.search(line):
            cause = f"worker {found['rank']} on {found['node']} hangs: {found['what']}"
            return Match(cause=cause, evidence=(evidence(LOG, found[0]),))
    return None


@failure(
    "slow-worker",
    seen="`slow_workers` in the newest `progress` line of the driver's log",
    remedy="Look at the node of pod {pod}: other load, a GPU that is too hot, a slow disk or network "
    "(`kubectl describe pod {pod} -n {namespace}` names it). To move the worker, drain that node: the "
    "run saves, and goes on elsewhere. If it is always the same rank, look at what your code does there.",
)
def slow_worker(snapshot: Snapshot) -> Match | None:
    """A worker is much slower than the others, which wait for it in each step."""
    progress = last_record(snapshot.log, PROGRESS) if snapshot.phase == "running" else None
    slow = (progress or {}).get("slow_workers", [])
    if not slow:
        return None
    worst = max(slow, key=lambda worker: float(worker["step_s"]))
    others = f", and {len(slow) - 1} more" if len(slow) > 1 else ""
    return Match(
        cause=(
            f"worker {worst['rank']} on {worst['node']} needs {worst['step_s']:.2g} s per step by itself, "
            f"the median worker {worst['median_s']:.2g} s{others}: all wait for it"
        ),
        evidence=tuple(evidence(LOG, f"slow_workers: {worker}") for worker in slow[:WORKERS_NAMED]),
        values={"pod": str(worst["node"])},
    )
