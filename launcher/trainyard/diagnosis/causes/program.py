"""Failures that the program in the pods tells itself, from clear words to bare tracebacks."""

from __future__ import annotations

import re

from trainyard.diagnosis.failure import Evidence, Sign, any_of, evidence, failure, matching
from trainyard.diagnosis.snapshot import Scene
from trainyard.submission.status import error_lines
from trainyard_trainer.run_files.driver_output import ERROR, PROGRESS, SUMMARY, last_record

LOG = "driver's log"
TRACEBACK_LINES = 5
"""How many of a traceback's last lines are shown."""

FRAME = r'\s+File ".*", line \d+'

NO_PROGRESS = re.compile(rf"^({PROGRESS}|{SUMMARY})\{{")


def _lines(scene: Scene) -> list[str]:
    """The log of a failed attempt, without its records; nothing of one that goes on."""
    if not scene.is_broken:
        return []
    return [line for line in scene.words.splitlines() if not NO_PROGRESS.match(line)]


def _error(scene: Scene) -> list[str]:
    """The program's last `error: ...` with its details; what its summary says, where no log is left."""
    if not scene.is_broken:
        return []
    lines = error_lines(scene.words)
    if lines and lines[0].startswith(ERROR):
        return lines
    summary = last_record(scene.words, SUMMARY) or scene.summary or {}
    return [f"{ERROR}{summary['error']}"] if summary.get("error") else []


def _told(scene: Scene, pattern: str, cause: str = "") -> Sign | None:
    """That the program's own error says so; by default the cause is its first line."""
    lines = _error(scene)
    if not lines or not re.search(pattern, "\n".join(lines)):
        return None
    return Sign(
        cause=cause or lines[0].removeprefix(ERROR),
        evidence=tuple(evidence(LOG, line) for line in lines),
    )


def _logged(scene: Scene, pattern: str, cause: str) -> Sign | None:
    """That some line of the log says so."""
    found = matching(_lines(scene), pattern)
    return None if found is None else Sign(cause=cause, evidence=(evidence(LOG, found[0]),))


# What cannot begin.


@failure(
    "missing-python",
    seen="exit code 127 of the entrypoint, `python: not found`",
    remedy="Put `python` (not only python3) on the image's PATH by ENV PATH: build on "
    "train_image/Dockerfile.",
)
def missing_python(scene: Scene) -> Sign | None:
    """The image has no program `python`."""
    pattern = r"python[\d.]*: (command )?not found|exit code 127"
    return _logged(scene, pattern, "the image has no `python` on its PATH")


@failure(
    "runtime-env",
    seen="`Failed to start supervisor actor`, `runtime_env setup failed` in the RayJob's message",
    remedy="Mend runtimeEnvYAML of the RayJob. A run needs none: packages belong into the image.",
)
def runtime_env(scene: Scene) -> Sign | None:
    """Ray could not set up the surroundings of the driver (runtime_env)."""
    pattern = r"Failed to start supervisor actor|runtime_env setup failed|RuntimeEnvSetupError"
    found = matching(_lines(scene), pattern)
    if found is None:
        return None
    said = found[0].partition("Full traceback")[0].strip()
    return Sign(cause=f"Ray could not start the driver: {said}", evidence=(evidence(LOG, said),))


@failure(
    "missing-trainer",
    seen="`No module named trainer` in the driver's log",
    remedy="Build the image from train_image/ (`make image IMAGE=...`), or put the package "
    "trainer into yours.",
)
def missing_trainer(scene: Scene) -> Sign | None:
    """The image does not hold the training program."""
    return _logged(
        scene,
        r"No module named '?trainer'?(\.__main__)?\b",
        "the image does not hold the package `trainer`",
    )


@failure(
    "wrong-ray-version",
    seen="Ray's `Version mismatch`; the driver's line `versions:` beside the platform's rayVersion",
    remedy="Set rayVersion of the platform's values to {found}, or use an image with Ray "
    "{wanted}: all pods of a run need the same.",
)
def wrong_ray_version(scene: Scene) -> Sign | None:
    """The image's Ray is not the version that the platform says."""
    if not scene.words:
        return None
    wanted = scene.ray_version
    lines = scene.words.splitlines()
    if matching(lines, r"Version mismatch: The cluster was started with"):
        versions = re.findall(r"^\s*Ray: (\S+)", scene.words, flags=re.MULTILINE)
        if len(set(versions)) > 1:
            return Sign(
                cause=f"the pods of the run have different Rays: {' and '.join(dict.fromkeys(versions))}",
                evidence=(
                    evidence(
                        LOG, f"Version mismatch: Ray {', Ray '.join(dict.fromkeys(versions))}"
                    ),
                ),
                values={"found": versions[-1], "wanted": wanted or versions[0]},
            )
    found = matching(lines, r"^versions: .*\bray ([\d.]+\w*)")
    if found is None or not wanted or found[1][1] == wanted or scene.phase == "succeeded":
        return None
    return Sign(
        cause=f"the image has Ray {found[1][1]}, and the platform says {wanted}",
        evidence=(
            evidence(LOG, found[0]),
            evidence(f"RayJob {scene.submission}", f"rayVersion {wanted}"),
        ),
        values={"found": found[1][1], "wanted": wanted},
    )


@failure(
    "other-config",
    seen="the driver's `error: the run ... exists in ... and is another one`",
    remedy="Submit it under another name (`trainyard submit RUN.yaml --name ANOTHER`), or put "
    "back what the lines above name.",
)
def other_config(scene: Scene) -> Sign | None:
    """The run's folder holds checkpoints of another config."""
    return _told(scene, r"the run \S+ exists in .* and is another one")


@failure(
    "lease-held",
    seen="the driver's `error: the run ... is being trained already`",
    remedy="Wait for the end of the other attempt, or stop it: `trainyard stop {run} -n "
    "{namespace}`, or the process that the line names.",
)
def lease_held(scene: Scene) -> Sign | None:
    """Another attempt trains the same run, and gives signs of life."""
    return _told(scene, "is being trained already")


@failure(
    "overtaken",
    seen="the driver's `error: attempt ... has taken over`, `the claim ... is gone`",
    remedy="Nothing: the run goes on there. If the folder was removed, submit the run again.",
)
def overtaken(scene: Scene) -> Sign | None:
    """A newer attempt has taken the run over, or its folder was removed."""
    return _told(scene, r"has taken over from|the claim .* is gone")


# Storage.


@failure(
    "s3-denied",
    seen="`AWS Error ACCESS_DENIED`, wrong keys or signatures in the driver's log",
    remedy="Check the Secret of storage.s3.secretName (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY),"
    " or the role of ServiceAccount trainyard-run: it needs to list, get, put and delete "
    "in the bucket.",
)
def s3_denied(scene: Scene) -> Sign | None:
    """The bucket does not accept the run's keys, or does not let them read and write."""
    pattern = any_of(
        "ACCESS_DENIED", "Access ?Denied", "INVALID_ACCESS_KEY_ID", "SIGNATURE_DOES_NOT_MATCH",
        "HTTP status 403",
        "XAdminUserNotFound", "INVALID_CLIENT_TOKEN_ID", "EXPIRED_TOKEN", "403 Forbidden",
    )  # fmt: skip
    found = matching(_lines(scene), pattern)
    if found is None:
        return None
    action = re.search(r"during (\w+) operation", found[0])
    asked = f" {action[1]}" if action else ""
    return Sign(
        cause=f"the bucket refuses the run{asked}: its keys are wrong, or may not do that",
        evidence=(evidence(LOG, found[0]),),
    )


@failure(
    "s3-no-bucket",
    seen="`AWS Error NO_SUCH_BUCKET` in the driver's log",
    remedy="Create the bucket, or mend storage.s3.path in the platform's values.",
)
def s3_no_bucket(scene: Scene) -> Sign | None:
    """The bucket of the storage does not exist."""
    found = matching(_lines(scene), any_of("NO_SUCH_BUCKET", "NoSuchBucket"))
    if found is None:
        return None
    bucket = re.search(r"in bucket '([^']+)'", found[0])
    return Sign(
        cause=f"bucket {bucket[1]} does not exist" if bucket else "the bucket does not exist",
        evidence=(evidence(LOG, found[0]),),
    )


@failure(
    "s3-unreachable",
    seen="`AWS Error NETWORK_CONNECTION` (curlCode 6, 7, 28, 60) in the driver's log",
    remedy="Check storage.s3.endpoint and region in the platform's values, the cluster's DNS, and"
    " that NetworkPolicies let pods out to it.",
)
def s3_unreachable(scene: Scene) -> Sign | None:
    """The pods do not reach the S3 endpoint: wrong address, name, certificate or network."""
    found = matching(
        _lines(scene), r"AWS Error NETWORK_CONNECTION|curlCode: \d+|PermanentRedirect|AWS Error 301"
    )
    if found is None:
        return None
    why = re.search(r"curlCode: \d+, ([^;]+)", found[0])
    return Sign(
        cause=f"the pods do not reach the S3 endpoint{f': {why[1]}' if why else ''}",
        evidence=(evidence(LOG, found[0]),),
    )


@failure(
    "storage-full",
    seen="`No space left on device` or `Disk quota exceeded` in the driver's log",
    remedy="Make room: `trainyard checkpoints prune`, remove old runs, or have the claim enlarged.",
)
def storage_full(scene: Scene) -> Sign | None:
    """The storage of the runs is full."""
    found = matching(_lines(scene), any_of("No space left on device", "Disk quota exceeded"))
    if found is None or "/dev/shm" in found[0] or "torch_" in found[0]:
        return None
    return Sign(cause="the storage is full", evidence=(evidence(LOG, found[0]),))


@failure(
    "node-local-storage",
    seen="a worker's `the claim ... is gone, or was never to be seen`, or `the last intact checkpoint "
    "in ... is missing` though training ended, with a storage path that no shared volume holds",
    remedy="Keep the folders of runs where all pods see them: a claim with ReadWriteMany "
    "(storage.claim), or a bucket (storage.s3).",
)
def node_local_storage(scene: Scene) -> Sign | None:
    """The folders of runs lie on a disk of one pod or node, which the others do not see."""
    lost = matching(
        _lines(scene),
        r"the last intact checkpoint in \S+ is missing|the claim \S+ is gone|"
        r"No such file or directory: '\S*(lease|checkpoints|run\.json)",
    )
    if lost is None:
        return None
    head = scene.spec.get("rayClusterSpec", {}).get("headGroupSpec", {}).get("template", {})
    shared = [
        volume
        for volume in head.get("spec", {}).get("volumes") or []
        if "persistentVolumeClaim" in volume or "nfs" in volume
    ]
    modes = {
        mode
        for claim in scene.claims.values()
        if claim is not None
        for mode in claim.get("spec", {}).get("accessModes", [])
    }
    places = {pod["spec"].get("nodeName") for pod in scene.pods} - {None}
    if shared and "ReadWriteMany" in modes:
        return None
    why = f"the claim has {', '.join(sorted(modes))}" if shared else "no shared volume is mounted"
    where = f", and the pods ran on {len(places)} nodes" if len(places) > 1 else ""
    return Sign(
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
def storage_unusable(scene: Scene) -> Sign | None:
    """The storage cannot be read or written, for a reason that is none of the above."""
    return _told(
        scene,
        r"the storage \S+ cannot be used|cannot be claimed|Read-only file system|Permission denied: '/mnt",
    )


# Training.


@failure(
    "diverged",
    seen="the driver's `error: the loss or a weight became NaN or infinite`",
    remedy="Lower train.optimizer.learning_rate, set train.clip_norm, or use precision fp32; the "
    "last good checkpoint is kept, and a changed config needs a new name (--name).",
)
def diverged(scene: Scene) -> Sign | None:
    """The training diverged: the loss or a weight became NaN or infinite."""
    return _told(scene, "became NaN or infinite")


@failure(
    "cuda-missing",
    seen="the driver's `error: CUDA is missing`",
    remedy="Install the NVIDIA driver, container toolkit and device plugin on the nodes it names,"
    " or train with resources.workers.",
)
def cuda_missing(scene: Scene) -> Sign | None:
    """Nodes offer GPUs that torch cannot use."""
    return _told(scene, "CUDA is missing|the check of the nodes' GPUs failed")


@failure(
    "ray-too-small",
    seen="the driver's `error: the Ray cluster is too small`",
    remedy="Ask for fewer workers (--gpus, --workers), or give the pool more CPUs per node: data "
    "needs one beside the workers.",
)
def ray_too_small(scene: Scene) -> Sign | None:
    """The Ray cluster has no place for all workers."""
    return _told(scene, "the Ray cluster is too small")


@failure(
    "gpu-memory",
    seen="`CUDA out of memory` in the driver's log",
    remedy="Set train.micro_batch_size lower (the global batch stays), or train.precision: bf16.",
)
def gpu_memory(scene: Scene) -> Sign | None:
    """The model and its batch do not fit into a GPU's memory."""
    return _logged(
        scene,
        any_of("CUDA out of memory", "torch.OutOfMemoryError", "CUDNN_STATUS_ALLOC_FAILED"),
        "a GPU's memory is too small for the model and its batch",
    )


@failure(
    "shared-memory",
    seen="`Bus error`, or `No space left on device` for /dev/shm, in the driver's log",
    remedy="Raise memoryGib of the pool: /dev/shm is as large as the pod's memory and counts in "
    "it. A volume of your own on /dev/shm must be large enough.",
)
def shared_memory(scene: Scene) -> Sign | None:
    """/dev/shm of a pod is too small (a bus error)."""
    return _logged(
        scene,
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
def too_many_bad_samples(scene: Scene) -> Sign | None:
    """More samples cannot be used than data.max_bad_samples allows."""
    return _told(scene, "samples that cannot be used")


@failure(
    "config-error",
    seen="exit code 2 of the driver: its `error: ...` says which key of the run file asks for "
    "what cannot be",
    remedy="Change the run file as the lines say, and submit it again; no retry helps.",
)
def config_error(scene: Scene) -> Sign | None:
    """The run file asks for something that cannot be."""
    if not re.search(r"failed with exit code 2\b", str(scene.status.get("message", ""))):
        return None
    return _told(scene, "^error: ")


@failure(
    "nccl-timeout",
    seen="`Watchdog caught collective operation timeout`, NCCL errors in the driver's log",
    remedy="See which worker fell silent (`trainyard logs {run} -n {namespace}`). If all hang "
    "from the first step, name the network's interface (network.interface) or preset "
    "(network.preset), and set network.debug: true.",
)
def nccl_timeout(scene: Scene) -> Sign | None:
    """Workers waited for each other in vain: the network between GPUs, or one worker that hangs."""
    return _logged(
        scene,
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
def stopped_by_signal(scene: Scene) -> Sign | None:
    """The driver was told to end (SIGTERM): its pod was deleted or its node drained."""
    return _told(scene, "the run was stopped by SIGTERM|the run was interrupted")


@failure(
    "worker-died",
    seen="Ray's ActorDiedError, WorkerCrashedError, `killed by SIGKILL` in the driver's log",
    remedy="Most often a pod had too little memory: raise memoryGib of the pool. `trainyard logs "
    "{run} -n {namespace}` has the worker's last words.",
)
def worker_died(scene: Scene) -> Sign | None:
    """A worker process died without a word of its own."""
    return _logged(
        scene,
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
def run_error(scene: Scene) -> Sign | None:
    """The training program says why it failed, in words that are none of the above."""
    if any(line.startswith(f"{ERROR}worker ") for line in _error(scene)):
        return None
    return _told(scene, "^error: ")


@failure(
    "user-code",
    seen="the last traceback of the driver's log",
    remedy="Mend the code where the traceback ends, and submit again. `trainyard logs {run} -n "
    "{namespace}` has all of it.",
)
def user_code(scene: Scene) -> Sign | None:
    """The code of the run raised an error."""
    told = [line for line in _error(scene) if line.startswith(f"{ERROR}worker ")]
    seen = [evidence(LOG, line) for line in told]
    cause = told[0].removeprefix(ERROR) if told else ""
    if last := _last_traceback([line for line in _lines(scene) if line.strip()]):
        seen += [Evidence(LOG, line.rstrip()) for line in last[-TRACEBACK_LINES:]]
        cause = cause or _without_prefix(last[-1]).strip()
    if not seen:
        return None
    return Sign(cause=f"the run's code raised an error: {cause}", evidence=tuple(seen))


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
def exit_code(scene: Scene) -> Sign | None:
    """The entrypoint ended with an exit code other than 0 and no words."""
    message = str(scene.status.get("message", ""))
    found = re.search(r"failed with exit code (-?\d+)", message)
    if not scene.is_broken or found is None:
        return None
    lines = _lines(scene)
    return Sign(
        cause=f"the driver ended with exit code {found[1]}",
        evidence=tuple(evidence(LOG, line) for line in lines[-TRACEBACK_LINES:]),
    )
