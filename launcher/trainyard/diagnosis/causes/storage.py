"""Storage that cannot be had: claims without a volume, volumes that nodes cannot share or mount."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainyard.diagnosis.failure import Evidence, Match, any_of, evidence, failure
from trainyard.diagnosis.snapshot import Object, Snapshot, event_time, name_of
from trainyard.diagnosis.symptoms import find, symptoms


def claim_events(snapshot: Snapshot, name: str) -> Iterator[Evidence]:
    """What was said of a claim, newest first."""
    for event in reversed(snapshot.events):
        about = event.get("involvedObject", {})
        if about.get("kind") == "PersistentVolumeClaim" and about.get("name") == name:
            yield evidence(
                f"event of claim {name} at {event_time(event)}",
                f"{event.get('reason')}: {event.get('message')}",
            )


def _pending_claims(snapshot: Snapshot) -> Iterator[tuple[str, Object]]:
    for name, claim in snapshot.claims.items():
        if claim is not None and claim.get("status", {}).get("phase") != "Bound":
            yield name, claim


def _class_of(claim: Object) -> str:
    return str(claim["spec"].get("storageClassName") or "")


@failure(
    "claim-missing",
    seen="a claim that the pods mount and the namespace does not have",
    remedy="Install the platform again (`make platform NAMESPACE={namespace}`), or set "
    "storage.claim.name to a claim that exists.",
)
def claim_missing(snapshot: Snapshot) -> Match | None:
    """The storage claim of the run does not exist."""
    for name, claim in snapshot.claims.items():
        if claim is None and not snapshot.is_over:
            symptom = find(snapshot, re.escape(name))
            seen = evidence(f"namespace {snapshot.namespace}", f"no PersistentVolumeClaim {name}")
            return Match(
                cause=f"the pods mount claim {name}, which namespace {snapshot.namespace} does not have",
                evidence=(seen, symptom.evidence) if symptom else (seen,),
            )
    return None


@failure(
    "wrong-storage-class",
    seen="a claim that is Pending with event ProvisioningFailed",
    remedy="Set storage.claim.storageClassName to a class that exists (`kubectl get "
    "storageclasses`); a claim's class cannot be changed, so delete claim {claim}, which "
    "has no volume yet, and run `make platform` again.",
)
def wrong_storage_class(snapshot: Snapshot) -> Match | None:
    """The storage claim names a storage class that does not exist."""
    for name, claim in _pending_claims(snapshot):
        for said in claim_events(snapshot, name):
            if "storageclass" in said.text and "not found" in said.text:
                return Match(
                    cause=f"claim {name} asks for storage class {_class_of(claim)}, which does not exist",
                    evidence=(said,),
                    values={"claim": name},
                )
    return None


@failure(
    "access-mode",
    seen="a claim that is Pending with ProvisioningFailed, a pod with FailedAttachVolume "
    "(Multi-Attach)",
    remedy="Use a storage class whose volumes many nodes may write (ReadWriteMany: NFS, CephFS, "
    "EFS, Filestore), or keep the folders of runs in a bucket (storage.s3).",
)
def access_mode(snapshot: Snapshot) -> Match | None:
    """The storage cannot be shared by nodes: ReadWriteMany is not to be had, or was not asked for."""
    symptom = find(snapshot, any_of("Multi-Attach error", "ReadWriteOncePod access mode"))
    if symptom is not None:
        return Match(
            cause="a volume that only one node or pod may mount is wanted by several",
            evidence=(symptom.evidence,),
        )
    for name, claim in _pending_claims(snapshot):
        for said in claim_events(snapshot, name):
            if re.search(any_of("access ?modes?", "MULTI_NODE", "ReadWriteMany"), said.text):
                modes = ", ".join(claim["spec"].get("accessModes", []))
                offering = f"class {_class_of(claim) or '(default)'}"
                return Match(
                    cause=f"claim {name} asks for {modes}, which {offering} does not offer",
                    evidence=(said,),
                )
    return None


@failure(
    "claim-unbound",
    seen="a claim that is Pending, pods with `unbound immediate PersistentVolumeClaims`",
    remedy="See `kubectl describe pvc {claim} -n {namespace}`: the cluster needs a provisioner "
    "for class {storage_class} or a free volume of at least {size} with {modes}.",
)
def claim_unbound(snapshot: Snapshot) -> Match | None:
    """The storage claim of the run has no volume."""
    for name, claim in _pending_claims(snapshot):
        storage_class = _class_of(claim)
        is_waiting = any(
            "WaitForFirstConsumer" in said.text for said in claim_events(snapshot, name)
        )
        unbound = find(snapshot, "unbound immediate|didn't find available persistent volumes")
        if is_waiting and unbound is None:
            continue  # it is bound when its first pod has a node
        size = claim["spec"].get("resources", {}).get("requests", {}).get("storage", "?")
        modes = ", ".join(claim["spec"].get("accessModes", []))
        return Match(
            cause=f"claim {name} ({size}, {modes}, class {storage_class or 'default'}) is "
            f"{claim.get('status', {}).get('phase', 'Pending')}: it has no volume",
            evidence=(
                *list(claim_events(snapshot, name))[:1],
                *((unbound.evidence,) if unbound else ()),
            )
            or (evidence(f"claim {name}", "Pending"),),
            values={
                "claim": name,
                "storage_class": storage_class or "(default)",
                "size": size,
                "modes": modes,
            },
        )
    return None


@failure(
    "volume-bound-elsewhere",
    seen="FailedScheduling with `node(s) didn't match PersistentVolume's node affinity` or `no "
    "available volume zone`",
    remedy="Keep the folders of runs on storage that all nodes of the pool reach (ReadWriteMany, "
    "or a bucket): this volume lies on one node or in one zone.",
)
def volume_bound_elsewhere(snapshot: Snapshot) -> Match | None:
    """The storage's volume lies on one node or in one zone, and the pods need another."""
    symptom = find(
        snapshot, "didn't match PersistentVolume's node affinity|no available volume zone"
    )
    if symptom is None:
        return None
    return Match(
        cause="the storage's volume is tied to one node or zone, where not all pods fit",
        evidence=(symptom.evidence,),
    )


@failure(
    "mount-failed",
    seen="events FailedMount or FailedAttachVolume of a pod that does not start",
    remedy="See `kubectl describe pod {pod} -n {namespace}`: the storage server must be up, and "
    "the node must have its client (NFS, CSI driver).",
)
def mount_failed(snapshot: Snapshot) -> Match | None:
    """A node cannot mount the storage."""
    for symptom in symptoms(snapshot):
        is_late = symptom.reason in ("FailedMount", "FailedAttachVolume")
        if is_late and not re.search(
            any_of("secret .* not found", "configmap .* not found"), symptom.text
        ):
            name = name_of(symptom.pod) if symptom.pod else "POD"
            return Match(
                cause=f"a node cannot mount the storage of {name}",
                evidence=(symptom.evidence,),
                values={"pod": name},
            )
    return None
