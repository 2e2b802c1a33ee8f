"""Storage that cannot be had: claims without a volume, volumes that nodes cannot share or mount."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainyard.diagnosis.complaints import complaints, find
from trainyard.diagnosis.failure import Evidence, Sign, any_of, evidence, failure
from trainyard.diagnosis.snapshot import Object, Scene, event_time, name_of


def claim_events(scene: Scene, name: str) -> Iterator[Evidence]:
    """What was said of a claim, newest first."""
    for event in reversed(scene.events):
        about = event.get("involvedObject", {})
        if about.get("kind") == "PersistentVolumeClaim" and about.get("name") == name:
            yield evidence(
                f"event of claim {name} at {event_time(event)}",
                f"{event.get('reason')}: {event.get('message')}",
            )


def _pending_claims(scene: Scene) -> Iterator[tuple[str, Object]]:
    for name, claim in scene.claims.items():
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
def claim_missing(scene: Scene) -> Sign | None:
    """The storage claim of the run does not exist."""
    for name, claim in scene.claims.items():
        if claim is None and not scene.is_over:
            complaint = find(scene, re.escape(name))
            seen = evidence(f"namespace {scene.namespace}", f"no PersistentVolumeClaim {name}")
            return Sign(
                cause=f"the pods mount claim {name}, which namespace {scene.namespace} does not have",
                evidence=(seen, complaint.evidence) if complaint else (seen,),
            )
    return None


@failure(
    "wrong-storage-class",
    seen="a claim that is Pending with event ProvisioningFailed",
    remedy="Set storage.claim.storageClassName to a class that exists (`kubectl get "
    "storageclasses`); a claim's class cannot be changed, so delete claim {claim}, which "
    "has no volume yet, and run `make platform` again.",
)
def wrong_storage_class(scene: Scene) -> Sign | None:
    """The storage claim names a storage class that does not exist."""
    for name, claim in _pending_claims(scene):
        for said in claim_events(scene, name):
            if "storageclass" in said.text and "not found" in said.text:
                return Sign(
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
def access_mode(scene: Scene) -> Sign | None:
    """The storage cannot be shared by nodes: ReadWriteMany is not to be had, or was not asked for."""
    complaint = find(scene, any_of("Multi-Attach error", "ReadWriteOncePod access mode"))
    if complaint is not None:
        return Sign(
            cause="a volume that only one node or pod may mount is wanted by several",
            evidence=(complaint.evidence,),
        )
    for name, claim in _pending_claims(scene):
        for said in claim_events(scene, name):
            if re.search(any_of("access ?modes?", "MULTI_NODE", "ReadWriteMany"), said.text):
                modes = ", ".join(claim["spec"].get("accessModes", []))
                offering = f"class {_class_of(claim) or '(default)'}"
                return Sign(
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
def claim_unbound(scene: Scene) -> Sign | None:
    """The storage claim of the run has no volume."""
    for name, claim in _pending_claims(scene):
        storage_class = _class_of(claim)
        is_waiting = any("WaitForFirstConsumer" in said.text for said in claim_events(scene, name))
        unbound = find(scene, "unbound immediate|didn't find available persistent volumes")
        if is_waiting and unbound is None:
            continue  # it is bound when its first pod has a node
        size = claim["spec"].get("resources", {}).get("requests", {}).get("storage", "?")
        modes = ", ".join(claim["spec"].get("accessModes", []))
        return Sign(
            cause=f"claim {name} ({size}, {modes}, class {storage_class or 'default'}) is "
            f"{claim.get('status', {}).get('phase', 'Pending')}: it has no volume",
            evidence=(
                *list(claim_events(scene, name))[:1],
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
def volume_bound_elsewhere(scene: Scene) -> Sign | None:
    """The storage's volume lies on one node or in one zone, and the pods need another."""
    complaint = find(
        scene, "didn't match PersistentVolume's node affinity|no available volume zone"
    )
    if complaint is None:
        return None
    return Sign(
        cause="the storage's volume is tied to one node or zone, where not all pods fit",
        evidence=(complaint.evidence,),
    )


@failure(
    "mount-failed",
    seen="events FailedMount or FailedAttachVolume of a pod that does not start",
    remedy="See `kubectl describe pod {pod} -n {namespace}`: the storage server must be up, and "
    "the node must have its client (NFS, CSI driver).",
)
def mount_failed(scene: Scene) -> Sign | None:
    """A node cannot mount the storage."""
    for complaint in complaints(scene):
        is_late = complaint.reason in ("FailedMount", "FailedAttachVolume")
        if is_late and not re.search(
            any_of("secret .* not found", "configmap .* not found"), complaint.text
        ):
            name = name_of(complaint.pod) if complaint.pod else "POD"
            return Sign(
                cause=f"a node cannot mount the storage of {name}",
                evidence=(complaint.evidence,),
                values={"pod": name},
            )
    return None
