"""Failures of KubeRay: its CRDs, its operator, objects that it refuses, and its deadlines."""

from __future__ import annotations

import re

from trainyard.diagnosis.activity import duration
from trainyard.diagnosis.failure import Match, evidence, failure
from trainyard.diagnosis.snapshot import (
    INIT_CONTAINER,
    Snapshot,
    event_time,
    is_head,
    is_ready,
    name_of,
    waits_for_head,
)
from trainyard.diagnosis.symptoms import find, symptoms
from trainyard.rules import deletion, operator_messages, raycluster, rayjob
from trainyard.rules.subject import Subject
from trainyard.submission.status import condition

SILENT_S = 60.0
"""After how many seconds without a status there is no operator; it normally needs one second."""

SUBMISSION_S = 120.0
"""Seconds within which Ray must accept the job once all pods are ready; KubeRay first tries every 3 s."""

OLDEST = (1, 6)
"""The oldest KubeRay that knows all fields of a submission."""
NEEDED = ".".join(map(str, OLDEST))

OPERATOR_RULES = (*rayjob.RULES, *deletion.RULES, *raycluster.RULES)
"""The rules whose violation sets the status ValidationFailed."""

MANAGERS = ("", "ray.io/kuberay-operator")


@failure(
    "missing-crd",
    seen="the API server's answer to a request for RayJobs",
    remedy="Install the KubeRay operator with its CRDs (`make operator`), then submit again.",
)
def missing_crd(snapshot: Snapshot) -> Match | None:
    """The cluster does not know RayJobs: the CRDs of KubeRay are not installed."""
    missing = [kind for kind in ("RayJob", "RayCluster") if kind in snapshot.missing_kinds]
    if not missing:
        return None
    return Match(
        cause=f"the cluster does not know {' and '.join(missing)}: KubeRay's CRDs are not installed",
        evidence=(evidence("API server", f"no resource {', '.join(missing)} in ray.io/v1"),),
    )


@failure(
    "deletion-hangs",
    seen="a RayJob that was deleted and keeps its finalizer, while the Secret with Ray's token is missing",
    remedy="Remove its finalizer: `kubectl patch rayjob {submission} -n {namespace} --type merge -p "
    """'{{"metadata":{{"finalizers":null}}}}'`; its pods are deleted with it.""",
)
def deletion_hangs(snapshot: Snapshot) -> Match | None:
    """The operator cannot stop the job of a deleted RayJob, since Ray's token is gone."""
    if snapshot.job is None or snapshot.has_token_secret is not False or not snapshot.ray_clusters:
        return None
    metadata = snapshot.job["metadata"]
    deleted_s = snapshot.seconds_since(metadata.get("deletionTimestamp"))
    if deleted_s < SILENT_S or not metadata.get("finalizers"):
        return None
    held = (
        f"deleted {duration(deleted_s)} ago and still held by {', '.join(metadata['finalizers'])}"
    )
    return Match(
        cause="the deletion hangs: KubeRay has to stop the job first, and Ray's token is missing",
        evidence=(
            evidence(f"RayJob {snapshot.submission}", held),
            evidence(
                f"RayCluster {name_of(snapshot.ray_clusters[0])}", "has no Secret with a token"
            ),
        ),
    )


@failure(
    "no-operator",
    seen="a RayJob that gets no status, or still exists after it was deleted",
    remedy="Start the operator (`make operator`), and make it watch namespace {namespace} (its "
    "value watchNamespace).",
)
def no_operator(snapshot: Snapshot) -> Match | None:
    """No KubeRay operator watches the namespace."""
    if snapshot.job is None or snapshot.spec.get("managedBy", "") not in MANAGERS:
        return None
    metadata = snapshot.job["metadata"]
    deleted_s = snapshot.seconds_since(metadata.get("deletionTimestamp"))
    waited_s = snapshot.seconds_since(metadata.get("creationTimestamp"))
    if deleted_s > SILENT_S and metadata.get("finalizers"):
        what = f"deleted {duration(deleted_s)} ago and still held by {', '.join(metadata['finalizers'])}"
    elif not snapshot.status and not snapshot.spec.get("suspend") and waited_s > SILENT_S:
        what = f"created {duration(waited_s)} ago, and it has no status yet"
    else:
        return None
    seen = [evidence(f"RayJob {snapshot.submission}", what)]
    if snapshot.operators is not None and not snapshot.operators and not snapshot.leases:
        seen.append(evidence("all namespaces", "no pod and no lease of a KubeRay operator"))
    for pod in snapshot.operators or ():
        if not is_ready(pod):
            phase = pod.get("status", {}).get("phase", "")
            place = f"{pod['metadata'].get('namespace')}/{name_of(pod)}"
            seen.append(evidence(f"operator's pod {place}", f"{phase}, not ready"))
    for lease in snapshot.leases or ():
        renewed = lease.get("spec", {}).get("renewTime")
        place = f"{lease['metadata'].get('namespace')}/{name_of(lease)}"
        seen.append(
            evidence(f"lease {place}", f"renewed {duration(snapshot.seconds_since(renewed))} ago")
        )
    return Match(
        cause=f"no KubeRay operator handles RayJob {snapshot.submission}",
        evidence=tuple(seen),
    )


@failure(
    "old-operator",
    seen="fields of the submission that the stored RayJob has lost; the operator's image",
    remedy=f"Upgrade KubeRay to {NEEDED} or newer, its CRDs first: helm does not upgrade them.",
)
def old_operator(snapshot: Snapshot) -> Match | None:
    """The KubeRay operator or its CRDs are too old for a submission."""
    for pod in snapshot.operators or ():
        image = str(pod["spec"]["containers"][0].get("image", ""))
        version = re.search(r":v?(\d+)\.(\d+)\.\d+", image)
        if version and (int(version[1]), int(version[2])) < OLDEST:
            return Match(
                cause=f"the KubeRay operator is {version[1]}.{version[2]}, and a run needs {NEEDED}",
                evidence=(evidence(f"operator's pod {name_of(pod)}", f"image {image}"),),
            )
    if snapshot.job is None:
        return None
    cluster_spec = snapshot.spec.get("rayClusterSpec", {})
    lost = [
        field
        for field, is_there in (
            ("preRunningDeadlineSeconds", "preRunningDeadlineSeconds" in snapshot.spec),
            ("rayClusterSpec.authOptions", "authOptions" in cluster_spec or not cluster_spec),
        )
        if not is_there
    ]
    if lost and snapshot.phase != "succeeded":
        return Match(
            cause=f"the CRDs of KubeRay are older than {NEEDED}: the stored RayJob has lost the "
            "fields that they do not know",
            evidence=(evidence(f"RayJob {snapshot.submission}", f"without {', '.join(lost)}"),),
        )
    wants_token = cluster_spec.get("authOptions", {}).get("mode") == "token"
    for pod in snapshot.pods:
        names = [variable["name"] for variable in pod["spec"]["containers"][0].get("env") or []]
        if wants_token and "RAY_ADDRESS" in names and "RAY_AUTH_MODE" not in names:
            return Match(
                cause=f"the KubeRay operator is older than its CRDs: it ignores authOptions, and a run "
                f"needs {NEEDED}",
                evidence=(evidence(f"pod {name_of(pod)}", "has no RAY_AUTH_MODE"),),
            )
    return None


@failure(
    "validation-failed",
    seen="RayJob status ValidationFailed",
    remedy="Correct what the lines above name, delete the RayJob (`trainyard delete {run} -n {namespace}` "
    "keeps the folder) and submit again: KubeRay never leaves this state.",
)
def validation_failed(snapshot: Snapshot) -> Match | None:
    """KubeRay found the RayJob invalid, before or after its start."""
    if snapshot.status.get("jobDeploymentStatus") != "ValidationFailed":
        return None
    message = str(snapshot.status.get("message", ""))
    seen = [evidence(f"RayJob {snapshot.submission}", f"ValidationFailed: {message}")]
    subject = Subject({"kind": "RayJob", **(snapshot.job or {})}, "1.6", None)
    broken = next((found for rule in OPERATOR_RULES for found in rule(subject)), None)
    if broken is not None:
        seen.append(evidence(f"rule {broken.rule}", str(broken)))
    return Match(cause=f"KubeRay refuses the RayJob: {message}", evidence=tuple(seen))


@failure(
    "invalid-cluster",
    seen="an event InvalidRayClusterSpec; the RayJob stays Initializing",
    remedy="Stop the run, correct what the message names in the platform's rayClusterSpec, and submit it "
    "again.",
)
def invalid_cluster(snapshot: Snapshot) -> Match | None:
    """KubeRay accepted the RayJob and refuses the RayCluster that it creates from it."""
    if not snapshot.never_ran:
        return None
    symptom = find(
        snapshot,
        "",
        ("InvalidRayClusterSpec", "InvalidRayClusterMetadata", "InvalidRayClusterStatus"),
    )
    if symptom is None:
        return None
    known = operator_messages.explain(symptom.text)
    return Match(
        cause="KubeRay refuses the run's RayCluster, and the RayJob waits for it for ever"
        + (f": {known.cause}" if known else ""),
        evidence=(symptom.evidence,),
    )


@failure(
    "no-dashboard-port",
    seen="a head that declares ports, none of them named dashboard",
    remedy="Name port 8265 of the head container `dashboard` in the platform's rayClusterSpec.",
)
def no_dashboard_port(snapshot: Snapshot) -> Match | None:
    """The operator cannot find the head's dashboard, since no port has that name."""
    head = snapshot.spec.get("rayClusterSpec", {}).get("headGroupSpec", {}).get("template", {})
    for container in head.get("spec", {}).get("containers", [])[:1]:
        names = [port.get("name", "") for port in container.get("ports") or []]
        if names and "dashboard" not in names and snapshot.never_ran:
            return Match(
                cause="the head declares ports and none is named dashboard: the operator never "
                "submits",
                evidence=(evidence(f"RayJob {snapshot.submission}", f"ports {', '.join(names)}"),),
            )
    return None


@failure(
    "submission-refused",
    seen="RayJob status Running with an empty jobStatus while all pods are ready, or "
    "SubmissionFailed",
    remedy="Read the head's log (`kubectl logs {head} -n {namespace}`): the image needs "
    "ray[default], the NetworkPolicies must let the operator reach port 8265. Then stop the run "
    "and submit it again: KubeRay 1.6 tries for ever.",
)
def submission_refused(snapshot: Snapshot) -> Match | None:
    """Ray's dashboard does not accept the job: it does not answer the operator, or refuses."""
    heads = [name_of(pod) for pod in snapshot.pods if is_head(pod)]
    values = {"head": heads[-1] if heads else "HEAD-POD"}
    status = snapshot.status
    if status.get("reason") in ("SubmissionFailed", "JobStatusCheckTimeoutExceeded"):
        return Match(
            cause="KubeRay could not submit the job to Ray",
            evidence=(
                evidence(
                    f"RayJob {snapshot.submission}",
                    f"{status['reason']}: {status.get('message', '')}",
                ),
            ),
            values=values,
        )
    if snapshot.phase != "submitting":
        return None
    ready_since = [condition(pod, "Ready").get("lastTransitionTime") for pod in snapshot.pods]
    waited_s = snapshot.seconds_since(max((time for time in ready_since if time), default=None))
    if waited_s < SUBMISSION_S or not all(is_ready(pod) for pod in snapshot.pods):
        return None
    return Match(
        cause=f"all {len(snapshot.pods)} pods are ready since {duration(waited_s)}, and Ray's dashboard has "
        "not accepted the job",
        evidence=(
            evidence(
                f"RayJob {snapshot.submission}", "jobDeploymentStatus Running, jobStatus empty"
            ),
        ),
        values=values,
    )


@failure(
    "head-unreachable",
    seen="worker pods whose init container wait-gcs-ready keeps running although the head is ready",
    remedy="Check the cluster's DNS, and that NetworkPolicies let the pods of a run reach port "
    "6379 of its head: `kubectl logs {pod} -c wait-gcs-ready -n {namespace}` shows what it "
    "tries.",
)
def head_unreachable(snapshot: Snapshot) -> Match | None:
    """Workers do not reach the head, by DNS or network, though it is ready."""
    head = next((pod for pod in snapshot.pods if is_head(pod) and is_ready(pod)), None)
    if head is None or snapshot.phase != "starting":
        return None
    head_s = snapshot.seconds_since(condition(head, "Ready").get("lastTransitionTime"))
    for pod in snapshot.pods:
        running = waits_for_head(pod)
        waited_s = min(head_s, snapshot.seconds_since(running.get("startedAt")))
        if waited_s > SUBMISSION_S:
            return Match(
                cause=f"the head is ready, and {name_of(pod)} has not reached it for "
                f"{duration(waited_s)}",
                evidence=(evidence(f"pod {name_of(pod)}, container {INIT_CONTAINER}", "running"),),
                values={"pod": name_of(pod)},
            )
    return None


@failure(
    "probe-failed",
    seen="events Unhealthy of a pod that runs and is not ready",
    remedy="Set rayVersion of the platform to the Ray of the image: it decides how the operator "
    "probes a pod. Below 2.53 the probe needs wget in the image.",
)
def probe_failed(snapshot: Snapshot) -> Match | None:
    """Ray runs in a pod, but the operator's probe never finds it ready."""
    for symptom in symptoms(snapshot):
        pod = symptom.pod
        if symptom.reason != "Unhealthy" or pod is None:
            continue
        began = pod.get("status", {}).get("startTime")
        is_clear = re.search(r"statuscode: 404|wget: |not found", symptom.text)
        if snapshot.seconds_since(began) > SUBMISSION_S and is_clear:
            return Match(
                cause=f"{name_of(pod)} runs for {duration(snapshot.seconds_since(began))}, and its probe "
                f"fails: Ray {snapshot.ray_version or '?'} of the platform may not be that of the image",
                evidence=(symptom.evidence,),
            )
    return None


@failure(
    "deadline",
    seen="RayJob reason DeadlineExceeded",
    remedy="Submit the run again: it goes on from its last checkpoint. The deadline follows from "
    "`limits` of the run file (max_run_s + max_start_s). The driver should have stopped the run before "
    "it: its log tells why it did not.",
)
def deadline(snapshot: Snapshot) -> Match | None:
    """An attempt took longer than activeDeadlineSeconds allows."""
    if snapshot.status.get("reason") != "DeadlineExceeded":
        return None
    limit = snapshot.spec.get("activeDeadlineSeconds", "?")
    return Match(
        cause=f"the attempt took longer than activeDeadlineSeconds: {limit}",
        evidence=(
            evidence(
                f"RayJob {snapshot.submission}",
                f"DeadlineExceeded: {snapshot.status.get('message', '')}",
            ),
        ),
    )


@failure(
    "pre-running-deadline",
    seen="RayJob reason PreRunningDeadlineExceeded, and no event with the reason",
    remedy="Find out what the pods waited for (`kubectl get events -n {namespace}`; events are kept "
    "for an hour), or raise limits.max_start_s of the run file (by default "
    "job.preRunningDeadlineSeconds of the platform).",
)
def pre_running_deadline(snapshot: Snapshot) -> Match | None:
    """The pods of an attempt did not all start within preRunningDeadlineSeconds."""
    if snapshot.status.get("reason") != "PreRunningDeadlineExceeded":
        return None
    limit = snapshot.spec.get("preRunningDeadlineSeconds", "?")
    said = [
        evidence(
            f"event of {event['involvedObject'].get('kind')} "
            f"{event['involvedObject'].get('name')} at {event_time(event)}",
            f"{event.get('reason')}: {event.get('message')}",
        )
        for event in snapshot.events[-3:]
    ]
    return Match(
        cause=f"the pods were not ready within preRunningDeadlineSeconds: {limit}",
        evidence=(
            evidence(
                f"RayJob {snapshot.submission}",
                f"PreRunningDeadlineExceeded: {snapshot.status.get('message', '')}",
            ),
            *said,
        ),
    )
