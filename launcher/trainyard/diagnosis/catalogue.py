"""The known failures in the order in which they are looked for: causes before what follows from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainyard.diagnosis.activity import doing
from trainyard.diagnosis.causes import admission, images, kuberay, placement, pods, program, storage
from trainyard.diagnosis.complaints import complaints
from trainyard.diagnosis.failure import Evidence, Failure, evidence
from trainyard.diagnosis.snapshot import Scene

LAST_LINES = 10
NODES = "Nodes"

CHAPTERS: tuple[tuple[str, tuple[Failure, ...]], ...] = (
    (
        "KubeRay",
        (
            kuberay.missing_crd,
            kuberay.deletion_hangs,
            kuberay.no_operator,
            kuberay.validation_failed,
            kuberay.old_operator,
        ),
    ),
    (
        "Queue",
        (
            admission.kueue_inactive,
            admission.kueue_waiting,
            admission.suspended,
        ),
    ),
    (
        "Pods that are not made",
        (
            kuberay.invalid_cluster,
            kuberay.no_dashboard_port,
            admission.pod_security,
            admission.resource_quota,
            admission.quota_needs_sizes,
            admission.limit_range,
            admission.service_account_missing,
            admission.priority_class_missing,
            admission.webhook_refused,
            admission.pods_refused,
        ),
    ),
    (
        "Storage",
        (
            storage.claim_missing,
            storage.wrong_storage_class,
            storage.access_mode,
            storage.claim_unbound,
            storage.volume_bound_elsewhere,
        ),
    ),
    (
        NODES,
        (
            placement.gpu_resource_name,
            placement.no_such_nodes,
            placement.nodes_closed,
            placement.taints,
            placement.too_few_gpus,
            placement.too_little_cpu_or_memory,
            placement.old_pods,
            placement.unschedulable,
        ),
    ),
    (
        "Pods that do not start",
        (
            pods.token_secret_missing,
            pods.secret_missing,
            pods.config_map_missing,
            pods.runs_as_root,
            storage.mount_failed,
            images.image_denied,
            images.image_unreachable,
            images.wrong_platform_image,
            images.no_such_tag,
            images.image_not_pulled,
            pods.no_shell,
            pods.init_container_oom,
        ),
    ),
    (
        "What the program says",
        (
            program.missing_python,
            program.runtime_env,
            program.missing_trainer,
            program.wrong_ray_version,
            program.other_config,
            program.lease_held,
            program.node_local_storage,
            program.overtaken,
            program.s3_denied,
            program.s3_no_bucket,
            program.s3_unreachable,
            program.storage_full,
            program.storage_unusable,
            program.diverged,
            program.cuda_missing,
            program.ray_too_small,
            program.gpu_memory,
            program.shared_memory,
            program.too_many_bad_samples,
            program.config_error,
        ),
    ),
    (
        "Pods that die",
        (
            pods.evicted_disk,
            pods.evicted_memory,
            pods.evicted,
            pods.preempted,
            pods.node_lost,
            pods.head_oom,
            pods.worker_oom,
            pods.container_crash,
        ),
    ),
    (
        "What follows from others",
        (
            kuberay.head_unreachable,
            kuberay.probe_failed,
            kuberay.deadline,
            kuberay.pre_running_deadline,
            kuberay.submission_refused,
            program.nccl_timeout,
            program.stopped_by_signal,
            program.worker_died,
            program.run_error,
            program.user_code,
            program.exit_code,
        ),
    ),
)

CATALOGUE: tuple[Failure, ...] = tuple(known for _, chapter in CHAPTERS for known in chapter)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The one cause, where it was seen, and the one remedy."""

    failure: str
    """Its name in the catalogue."""
    cause: str
    evidence: tuple[Evidence, ...]
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """How a run stands, and why."""

    run: str
    namespace: str
    submission: str
    phase: str
    doing: str
    """What it does, and for how long."""
    is_failed: bool
    finding: Finding | None
    """None for a run in good health, and for a failure that the catalogue does not know."""
    known: tuple[Evidence, ...]
    """Of a failure that the catalogue does not know: all that was said."""
    unread: tuple[str, ...]
    """What could not be looked at."""

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def explain(scene: Scene) -> Explanation:
    """The first failure of the catalogue that the scene shows, if the run has not succeeded."""
    finding = None
    is_well = scene.phase in ("succeeded", "stopped") or (
        scene.phase is None and (scene.summary or {}).get("outcome") == "succeeded"
    )
    if not is_well:
        finding = next((found for known in CATALOGUE if (found := _look(known, scene))), None)
    is_failed = scene.phase == "failed" or scene.is_broken
    return Explanation(
        run=scene.run,
        namespace=scene.namespace,
        submission=scene.submission,
        phase=scene.phase or "gone",
        doing=doing(scene),
        is_failed=is_failed,
        finding=finding,
        known=_known(scene) if is_failed and finding is None else (),
        unread=scene.unread,
    )


POD_CHAPTERS = ("Storage", NODES, "Pods that do not start")


def explain_pod(scene: Scene) -> Finding | None:
    """Why a pod that is no part of a run does not start."""
    known = (known for title, chapter in CHAPTERS if title in POD_CHAPTERS for known in chapter)
    return next((found for one in known if (found := _look(one, scene))), None)


def _look(known: Failure, scene: Scene) -> Finding | None:
    sign = known.look(scene)
    if sign is None:
        return None
    return Finding(
        failure=known.name,
        cause=sign.cause,
        evidence=sign.evidence,
        remedy=known.remedy_for(scene, sign),
    )


def _known(scene: Scene) -> tuple[Evidence, ...]:
    status = scene.status
    said = []
    if status:
        said.append(
            evidence(
                f"RayJob {scene.submission}",
                f"{status.get('jobDeploymentStatus', '')} {status.get('jobStatus', '')} "
                f"{status.get('reason', '')}",
            )
        )
    said += [complaint.evidence for complaint in complaints(scene)][:5]
    said += [evidence("driver's log", line) for line in scene.words.splitlines()[-LAST_LINES:]]
    return tuple(said)
