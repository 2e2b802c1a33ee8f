"""List the known failures in the order in which they are tried: causes before their consequences."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainyard.diagnosis.activity import current_activity
from trainyard.diagnosis.causes import (
    admission,
    containers,
    images,
    kuberay,
    kueue,
    placement,
    pods,
    program_end,
    program_start,
    run_storage,
    storage,
    training,
)
from trainyard.diagnosis.failure import Evidence, Failure, evidence
from trainyard.diagnosis.snapshot import Snapshot
from trainyard.diagnosis.symptoms import symptoms

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
            kueue.kueue_inactive,
            kueue.kueue_failed_to_start,
            kueue.kueue_too_large,
            kueue.kueue_domain_too_small,
            kueue.kueue_waiting,
            kueue.suspended,
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
            storage.data_claim_missing,
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
            containers.token_secret_missing,
            containers.secret_missing,
            containers.config_map_missing,
            containers.runs_as_root,
            storage.data_mount_failed,
            storage.mount_failed,
            images.image_denied,
            images.image_unreachable,
            images.wrong_platform_image,
            images.no_such_tag,
            images.image_not_pulled,
            containers.no_shell,
            containers.init_container_oom,
        ),
    ),
    (
        "What the program says",
        (
            program_end.run_limit,
            program_start.missing_python,
            program_start.runtime_env,
            program_start.missing_trainer,
            program_start.wrong_ray_version,
            program_start.other_config,
            program_start.lease_held,
            run_storage.node_local_storage,
            program_start.overtaken,
            run_storage.s3_denied,
            run_storage.s3_no_bucket,
            run_storage.s3_unreachable,
            run_storage.storage_full,
            run_storage.storage_unusable,
            training.diverged,
            training.cuda_missing,
            training.ray_too_small,
            training.gpu_memory,
            training.shared_memory,
            training.too_many_bad_samples,
            training.config_error,
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
            containers.container_crash,
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
            training.nccl_timeout,
            training.worker_hangs,
            training.slow_worker,
            program_end.stopped_by_signal,
            program_end.worker_died,
            program_end.run_error,
            program_end.user_code,
            program_end.exit_code,
        ),
    ),
)

CATALOGUE: tuple[Failure, ...] = tuple(known for _, chapter in CHAPTERS for known in chapter)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The cause of a failure, the evidence for it, and the remedy."""

    failure: str
    """The name of the failure in the catalogue."""
    cause: str
    evidence: tuple[Evidence, ...]
    remedy: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """The state of a run, and the cause of its failure if it has one."""

    run: str
    namespace: str
    context: str | None
    """The kubeconfig context that was chosen; None for the current one."""
    submission: str
    phase: str
    activity: str
    """What the run is doing, and for how long."""
    is_failed: bool
    finding: Finding | None
    """The known failure; None for a run without problems, and for a failure that is not in the catalogue."""
    observations: tuple[Evidence, ...]
    """All messages about a failure that is not in the catalogue."""
    unread: tuple[str, ...]
    """Objects and logs that could not be read."""

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def explain(snapshot: Snapshot) -> Explanation:
    """Explain a snapshot by the first failure of the catalogue that it shows, unless the run succeeded.

    A run that was stopped is explained only if its driver has stopped it.
    """
    finding = None
    is_well = snapshot.phase in ("succeeded", "stopped") or (
        snapshot.phase is None and (snapshot.summary or {}).get("outcome") == "succeeded"
    )
    if not is_well:
        finding = next((found for known in CATALOGUE if (found := _detect(known, snapshot))), None)
    elif snapshot.phase == "stopped":
        finding = _detect(program_end.run_limit, snapshot)
    is_failed = snapshot.phase == "failed" or snapshot.is_broken
    return Explanation(
        run=snapshot.run,
        namespace=snapshot.namespace,
        context=snapshot.context,
        submission=snapshot.submission,
        phase=snapshot.phase or "gone",
        activity=current_activity(snapshot),
        is_failed=is_failed,
        finding=finding,
        observations=_observations(snapshot) if is_failed and finding is None else (),
        unread=snapshot.unread,
    )


POD_CHAPTERS = ("Storage", NODES, "Pods that do not start")


def explain_pod(snapshot: Snapshot) -> Finding | None:
    """Return why a pod that does not belong to a run does not start; None if it is not known."""
    known = (known for title, chapter in CHAPTERS if title in POD_CHAPTERS for known in chapter)
    return next((found for one in known if (found := _detect(one, snapshot))), None)


def _detect(known: Failure, snapshot: Snapshot) -> Finding | None:
    match = known.detect(snapshot)
    if match is None:
        return None
    return Finding(
        failure=known.name,
        cause=match.cause,
        evidence=match.evidence,
        remedy=known.remedy_for(snapshot, match),
    )


def _observations(snapshot: Snapshot) -> tuple[Evidence, ...]:
    status = snapshot.status
    said = []
    if status:
        said.append(
            evidence(
                f"RayJob {snapshot.submission}",
                f"{status.get('jobDeploymentStatus', '')} {status.get('jobStatus', '')} "
                f"{status.get('reason', '')}",
            )
        )
    said += [symptom.evidence for symptom in symptoms(snapshot)][:5]
    said += [
        evidence("driver's log", line) for line in snapshot.driver_log.splitlines()[-LAST_LINES:]
    ]
    return tuple(said)
