"""Failures that the program in the pods tells itself, from clear words to bare tracebacks."""

from __future__ import annotations

import re

from trainyard.diagnosis.failure import Evidence, Match, any_of, evidence, failure, last_match
from trainyard.diagnosis.snapshot import Snapshot
from trainyard.submission.status import error_lines
from trainyard_trainer.run_files.driver_output import ERROR, PROGRESS, SUMMARY, last_record

LOG = "driver's log"
TRACEBACK_LINES = 5
"""How many of a traceback's last lines are shown."""

FRAME = r'\s+File ".*", line \d+'

NO_PROGRESS = re.compile(rf"^({PROGRESS}|{SUMMARY})\{{")


def _lines(snapshot: Snapshot) -> list[str]:
    """The log of a failed attempt, without its records; nothing of one that goes on."""
    if not snapshot.is_broken:
        return []
    return [line for line in snapshot.driver_log.splitlines() if not NO_PROGRESS.match(line)]


def _error(snapshot: Snapshot) -> list[str]:
    """The program's last `error: ...` with its details; what its summary says, where no log is left."""
    if not snapshot.is_broken:
        return []
    lines = error_lines(snapshot.driver_log)
    if lines and lines[0].startswith(ERROR):
        return lines
    summary = last_record(snapshot.driver_log, SUMMARY) or snapshot.summary or {}
    return [f"{ERROR}{summary['error']}"] if summary.get("error") else []


def _told(snapshot: Snapshot, pattern: str, cause: str = "") -> Match | None:
    """That the program's own error says so; by default the cause is its first line."""
    lines = _error(snapshot)
    if not lines or not re.search(pattern, "\n".join(lines)):
        return None
    return Match(
        cause=cause or lines[0].removeprefix(ERROR),
        evidence=tuple(evidence(LOG, line) for line in lines),
    )


def _logged(snapshot: Snapshot, pattern: str, cause: str) -> Match | None:
    """That some line of the log says so."""
    found = last_match(_lines(snapshot), pattern)
    return None if found is None else Match(cause=cause, evidence=(evidence(LOG, found[0]),))


# What cannot begin.


@failure(
    "missing-python",
    seen="exit code 127 of the entrypoint, `python: not found`",
    remedy="Put `python` (not only python3) on the image's PATH by ENV PATH: build on "
    "train_image/Dockerfile.",
)
def missing_python(snapshot: Snapshot) -> Match | None:
    """The image has no program `python`."""
    pattern = r"python[\d.]*: (command )?not found|exit code 127"
    return _logged(snapshot, pattern, "the image has no `python` on its PATH")


@failure(
    "runtime-env",
    seen="`Failed to start supervisor actor`, `runtime_env setup failed` in the RayJob's message",
    remedy="Mend runtimeEnvYAML of the RayJob. A run needs none: packages belong into the image.",
)
def runtime_env(snapshot: Snapshot) -> Match | None:
    """Ray could not set up the surroundings of the driver (runtime_env)."""
    pattern = r"Failed to start supervisor actor|runtime_env setup failed|RuntimeEnvSetupError"
    found = last_match(_lines(snapshot), pattern)
    if found is None:
        return None
    said = found[0].partition("Full traceback")[0].strip()
    return Match(cause=f"Ray could not start the driver: {said}", evidence=(evidence(LOG, said),))


@failure(
    "missing-trainer",
    seen="`No module named trainer` in the driver's log",
    remedy="Build the image from train_image/ (`make image IMAGE=...`), or put the package "
    "trainer into yours.",
)
def missing_trainer(snapshot: Snapshot) -> Match | None:
    """The image does not hold the training program."""
    return _logged(
        snapshot,
        r"No module named '?trainer'?(\.__main__)?\b",
        "the image does not hold the package `trainer`",
    )


@failure(
    "wrong-ray-version",
    seen="Ray's `Version mismatch`; the driver's line `versions:` beside the platform's rayVersion",
    remedy="Set rayVersion of the platform's values to {found}, or use an image with Ray "
    "{wanted}: all pods of a run need the same.",
)
def wrong_ray_version(snapshot: Snapshot) -> Match | None:
    """The image's Ray is not the version that the platform says."""
    if not snapshot.driver_log:
        return None
    wanted = snapshot.ray_version
    lines = snapshot.driver_log.splitlines()
    if last_match(lines, r"Version mismatch: The cluster was started with"):
        versions = re.findall(r"^\s*Ray: (\S+)", snapshot.driver_log, flags=re.MULTILINE)
        if len(set(versions)) > 1:
            return Match(
                cause=f"the pods of the run have different Rays: {' and '.join(dict.fromkeys(versions))}",
                evidence=(
                    evidence(
                        LOG, f"Version mismatch: Ray {', Ray '.join(dict.fromkeys(versions))}"
                    ),
                ),
                values={"found": versions[-1], "wanted": wanted or versions[0]},
            )
    found = last_match(lines, r"^versions: .*\bray ([\d.]+\w*)")
    if found is None or not wanted or found[1][1] == wanted or snapshot.phase == "succeeded":
        return None
    return Match(
        cause=f"the image has Ray {found[1][1]}, and the platform says {wanted}",
        evidence=(
            evidence(LOG, found[0]),
            evidence(f"RayJob {snapshot.submission}", f"rayVersion {wanted}"),
        ),
        values={"found": found[1][1], "wanted": wanted},
    )


@failure(
    "other-config",
    seen="the driver's `error: the run ... exists in ... and is another one`",
    remedy="Submit it under another name (`trainyard submit RUN.yaml --name ANOTHER`), or put "
    "back what the lines above name.",
)
def other_config(snapshot: Snapshot) -> Match | None:
    """The run's folder holds checkpoints of another config."""
    return _told(snapshot, r"the run \S+ exists in .* and is another one")


@failure(
    "lease-held",
    seen="the driver's `error: the run ... is being trained already`",
    remedy="Wait for the end of the other attempt, or stop it: `trainyard stop {run} -n "
    "{namespace}`, or the process that the line names.",
)
def lease_held(snapshot: Snapshot) -> Match | None:
    """Another attempt trains the same run, and gives signs of life."""
    return _told(snapshot, "is being trained already")


@failure(
    "overtaken",
    seen="the driver's `error: attempt ... has taken over`, `the claim ... is gone`",
    remedy="Nothing: the run goes on there. If the folder was removed, submit the run again.",
)
def overtaken(snapshot: Snapshot) -> Match | None:
    """A newer attempt has taken the run over, or its folder was removed."""
    return _told(snapshot, r"has taken over from|the claim .* is gone")


# Storage.


@failure(
    "s3-denied",
    seen="`AWS Error ACCESS_DENIED`, wrong keys or signatures in the driver's log",
    remedy="Check the Secret of storage.s3.secretName (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY),"
    " or the role of ServiceAccount trainyard-run: it needs to list, get, put and delete "
    "in the bucket.",
)
def s3_denied(snapshot: Snapshot) -> Match | None:
    """The bucket does not accept the run's keys, or does not let them read and write."""
    pattern = any_of(
        "ACCESS_DENIED", "Access ?Denied", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH",
        "HTTP status 403",
        "XAdminUserNotFound", "INVALID_CLIENT_TOKEN_ID", "EXPIRED_TOKEN", "403 Forbidden",
    )  # fmt: skip
    found = last_match(_lines(snapshot), pattern)
    if found is None:
        return None
    action = re.search(r"during (\w+) operation", found[0])
    asked = f" {action[1]}" if action else ""
    return Match(
        cause=f"the bucket refuses the run{asked}: its keys are wrong, or may not do that",
        evidence=(evidence(LOG, found[0]),),
    )


@failure(
    "s3-no-bucket",
    seen="`AWS Error NO_SUCH_BUCKET` in the driver's log",
    remedy="Create the bucket, or mend storage.s3.path in the platform's values.",
)
def s3_no_bucket(snapshot: Snapshot) -> Match | None:
    """The bucket of the storage does not exist."""
    found = last_match(_lines(snapshot), any_of("NO_SUCH_BUCKET", "NoSuchBucket"))
    if found is None:
        return None
    bucket = re.search(r"in bucket '([^']+)'", found[0])
    return Match(
        cause=f"bucket {bucket[1]} does not exist" if bucket else "the bucket does not exist",
        evidence=(evidence(LOG, found[0]),),
    )


@failure(
    "s3-unreachable",
    seen="`AWS Error NETWORK_CONNECTION` (curlCode 6, 7, 28, 60) in the driver's log",
    remedy="Check storage.s3.endpoint and region in the platform's values, the cluster's DNS, and"
    " that NetworkPolicies let pods out to it.",
)
def s3_unreachable(snapshot: Snapshot) -> Match | None:
    """The pods do not reach the S3 endpoint: wrong address, name, certificate or network."""
    found = last_match(
        _lines(snapshot),
        r"AWS Error NETWORK_CONNECTION|curlCode: \d+|PermanentRedirect|AWS Error 301",
    )
    if found is None:
        return None
    why = re.search(r"curlCode: \d+, ([^;]+)", found[0])
    return Match(
        cause=f"the pods do not reach the S3 endpoint{f': {why[1]}' if why else ''}",
        evidence=(evidence(LOG, found[0]),),
    )


@failure(
    "storage-full",
    seen="`No space left on device` or `Disk quota exceeded` in the driver's log",
    remedy="Make room: `trainyard checkpoints prune`, remove old runs, or have the claim enlarged.",
)
def storage_full(snapshot: Snapshot) -> Match | None:
    """The storage of the runs is full."""
    found = last_match(_lines(snapshot), any_of("No space left on device", "Disk quota exceeded"))
    if found is None or "/dev/shm" in found[0] or "torch_" in found[0]:
        return None
    return Match(cause="the storage is full", evidence=(evidence(LOG, found[0]),))


@failure(
    "node-local-storage",
    seen="a worker's `the claim ... is gone, or was never to be seen`, or `the last intact checkpoint "
    "in ... is missing` though training ended, with a storage path that no shared volume holds",
    remedy="Keep the folders of runs where all pods see them: a claim with ReadWriteMany "
    "(storage.claim), or a bucket (storage.s3).",
)
def node_local_storage(snapshot: Snapshot) -> Match | None:
    """The folders of runs lie on a disk of one pod or node, which the others do not see."""
    lost = last_match(
        _lines(snapshot),
        r"the last intact checkpoint in \S+ is missing|the claim \S+ is gone|"
        r"No such file or directory: '\S*(lease|checkpoints|run\.json)",
    )
    if lost is None:
        return None
    head = snapshot.spec.get("rayClusterSpec", {}).get("headGroupSpec", {}).get("template", {})
    shared = [
        volume
        for volume in head.get("spec", {}).get("volumes") or []
        if "persistentVolumeClaim" in volume or "nfs" in volume
    ]
    modes = {
        mode
        for claim in snapshot.claims.values()
        if claim is not None
        for mode in claim.get("spec", {}).get("accessModes", [])
    }
    places = {pod["spec"].get("nodeName") for pod in snapshot.pods} - {None}
    if shared and "ReadWriteMany" in modes:
        return None
    why = f"the claim has {', '.join(sorted(modes))}" if shared else "no shared volume is mounted"
    where = f", and the pods ran on {len(places)} nodes" if len(places) > 1 else ""
    return Match(
        cause=f"what one pod writes into the run's folder the others do not see: {why}{where}",
        evidence=(evidence(LOG, lost[0]),),
    )


@failure(
    "storage-unusable",
    seen="the driver's `error: the storage ... cannot be used`, `the run's folder ... cannot be "
    "claimed`",
    remedy="Check that storage.path is a mounted volume or bucket which user 1000 may read and "
    "write (`trainyard preflight -n {namespace}` tries it).",
)
def storage_unusable(snapshot: Snapshot) -> Match | None:
    """The storage cannot be read or written, for a reason that is none of the above."""
    return _told(
        snapshot,
        r"the storage \S+ cannot be used|cannot be claimed|Read-only file system|Permission denied: '/mnt",
    )


# Training.


@failure(
    "diverged",
    seen="the driver's `error: the loss or a weight became NaN or infinite`",
    remedy="Lower train.optimizer.learning_rate, set train.clip_norm, or use precision fp32; the "
    "last good checkpoint is kept, and a changed config needs a new name (--name).",
)
def diverged(snapshot: Snapshot) -> Match | None:
    """The training diverged: the loss or a weight became NaN or infinite."""
    return _told(snapshot, "became NaN or infinite")


@failure(
    "cuda-missing",
    seen="the driver's `error: CUDA is missing`",
    remedy="Install the NVIDIA driver, container toolkit and device plugin on the nodes it names,"
    " or train with resources.workers.",
)
def cuda_missing(snapshot: Snapshot) -> Match | None:
    """Nodes offer GPUs that torch cannot use."""
    return _told(snapshot, "CUDA is missing|the check of the nodes' GPUs failed")


@failure(
    "ray-too-small",
    seen="the driver's `error: the Ray cluster is too small`",
    remedy="Ask for fewer workers (--gpus, --workers), or give the pool more CPUs per node: data "
    "needs one beside the workers.",
)
def ray_too_small(snapshot: Snapshot) -> Match | None:
    """The Ray cluster has no place for all workers."""
    return _told(snapshot, "the Ray cluster is too small")


@failure(
    "gpu-memory",
    seen="`CUDA out of memory` in the driver's log",
    remedy="Set train.micro_batch_size lower (the global batch stays), or train.precision: bf16.",
)
def gpu_memory(snapshot: Snapshot) -> Match | None:
    """The model and its batch do not fit into a GPU's memory."""
    return _logged(
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
    return _logged(
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
    remedy="Mend or remove the samples that the lines above name, or allow them with "
    "data.max_bad_samples.",
)
def too_many_bad_samples(snapshot: Snapshot) -> Match | None:
    """More samples cannot be used than data.max_bad_samples allows."""
    return _told(snapshot, "samples that cannot be used")


@failure(
    "config-error",
    seen="exit code 2 of the driver: its `error: ...` says which key of the run file asks for "
    "what cannot be",
    remedy="Change the run file as the lines say, and submit it again; no retry helps.",
)
def config_error(snapshot: Snapshot) -> Match | None:
    """The run file asks for something that cannot be."""
    if not re.search(r"failed with exit code 2\b", str(snapshot.status.get("message", ""))):
        return None
    return _told(snapshot, "^error: ")


@failure(
    "nccl-timeout",
    seen="`Watchdog caught collective operation timeout`, NCCL errors in the driver's log",
    remedy="See which worker fell silent (`trainyard logs {run} -n {namespace}`). If all hang "
    "from the first step, name the network's interface (network.interface) or preset "
    "(network.preset), and set network.debug: true.",
)
def nccl_timeout(snapshot: Snapshot) -> Match | None:
    """Workers waited for each other in vain: the network between GPUs, or one worker that hangs."""
    return _logged(
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
    "stopped-by-signal",
    seen="the driver's `error: the run was stopped by SIGTERM`",
    remedy="Submit the run again: it goes on from its last checkpoint. Who stopped it tell the "
    "events of the namespace (drain, deletion).",
)
def stopped_by_signal(snapshot: Snapshot) -> Match | None:
    """The driver was told to end (SIGTERM): its pod was deleted or its node drained."""
    return _told(snapshot, "the run was stopped by SIGTERM|the run was interrupted")


@failure(
    "worker-died",
    seen="Ray's ActorDiedError, WorkerCrashedError, `killed by SIGKILL` in the driver's log",
    remedy="Most often a pod had too little memory: raise memoryGib of the pool. `trainyard logs "
    "{run} -n {namespace}` has the worker's last words.",
)
def worker_died(snapshot: Snapshot) -> Match | None:
    """A worker process died without a word of its own."""
    return _logged(
        snapshot,
        any_of(
            "ActorDiedError",
            "WorkerCrashedError",
            "The actor died unexpectedly",
            "ActorUnavailableError",
            "worker .* failed.*(SIGKILL|SIGSEGV)",
            "Worker exit type: SYSTEM_ERROR",
        ),
        "a worker process died without a word of its own: memory, a crash in native code, or its pod went",
    )


@failure(
    "run-error",
    seen="the driver's `error: ...`, for any other reason",
    remedy="Do what the lines say, and submit again: the run goes on from its last checkpoint.",
)
def run_error(snapshot: Snapshot) -> Match | None:
    """The training program says why it failed, in words that are none of the above."""
    if any(line.startswith(f"{ERROR}worker ") for line in _error(snapshot)):
        return None
    return _told(snapshot, "^error: ")


@failure(
    "user-code",
    seen="the last traceback of the driver's log",
    remedy="Mend the code where the traceback ends, and submit again. `trainyard logs {run} -n "
    "{namespace}` has all of it.",
)
def user_code(snapshot: Snapshot) -> Match | None:
    """The code of the run raised an error."""
    told = [line for line in _error(snapshot) if line.startswith(f"{ERROR}worker ")]
    seen = [evidence(LOG, line) for line in told]
    cause = told[0].removeprefix(ERROR) if told else ""
    if last := _last_traceback([line for line in _lines(snapshot) if line.strip()]):
        seen += [Evidence(LOG, line.rstrip()) for line in last[-TRACEBACK_LINES:]]
        cause = cause or _without_prefix(last[-1]).strip()
    if not seen:
        return None
    return Match(cause=f"the run's code raised an error: {cause}", evidence=tuple(seen))


def _last_traceback(lines: list[str]) -> list[str]:
    """The lines up to the error that ends it; its first lines may be cut off, as KubeRay quotes few."""
    frames = [n for n, line in enumerate(lines) if re.match(FRAME, _without_prefix(line))]
    if not frames:
        return []
    end = next(
        (n for n in range(frames[-1], len(lines)) if re.match(r"\S", _without_prefix(lines[n]))),
        len(lines) - 1,
    )
    return lines[: end + 1]


def _without_prefix(line: str) -> str:
    """A line without the `(RayTrainWorker pid=12, ip=10.0.0.1) ` that Ray puts before it."""
    return re.sub(r"^\([^)]*pid=[^)]*\) ", "", line)


@failure(
    "exit-code",
    seen="RayJob reason AppFailed, and nothing in the log that says why",
    remedy="Read the whole log: `trainyard logs {run} -n {namespace}`.",
)
def exit_code(snapshot: Snapshot) -> Match | None:
    """The entrypoint ended with an exit code other than 0 and no words."""
    message = str(snapshot.status.get("message", ""))
    found = re.search(r"failed with exit code (-?\d+)", message)
    if not snapshot.is_broken or found is None:
        return None
    lines = _lines(snapshot)
    return Match(
        cause=f"the driver ended with exit code {found[1]}",
        evidence=tuple(evidence(LOG, line) for line in lines[-TRACEBACK_LINES:]),
    )
