"""Failures of storage: claims without a volume, and volumes that nodes cannot share or mount."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainyard.diagnosis.failure import Evidence, Match, any_of, evidence, failure
from trainyard.diagnosis.snapshot import Object, Snapshot, event_time, name_of
from trainyard.diagnosis.symptoms import find, symptoms

DATA_PREFIX = "data-"
"""The beginning of the names of volumes that the chart makes of `data.volumes`."""

NAMED_VOLUME = rf'(?:volume "|unmounted volumes=\[(?:[^\]]* )?){DATA_PREFIX}([a-z0-9-]+)'
"""Finds the data volume that the kubelet could not mount. Where it names the PersistentVolume in place of the
pod's volume, a later event tells the unmounted volumes of the pod."""


def claim_events(snapshot: Snapshot, name: str) -> Iterator[Evidence]:
    """Yield the events of a claim as evidence, newest first."""
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


def _data_volume_of(snapshot: Snapshot, claim: str) -> str | None:
    """Return the name of the data volume that a claim of the run belongs to; None for another claim."""
    shape = snapshot.spec.get("rayClusterSpec") or {}
    for group in [shape.get("headGroupSpec") or {}, *(shape.get("workerGroupSpecs") or [])]:
        for volume in group.get("template", {}).get("spec", {}).get("volumes") or []:
            is_data = str(volume["name"]).startswith(DATA_PREFIX)
            if is_data and (volume.get("persistentVolumeClaim") or {}).get("claimName") == claim:
                return str(volume["name"]).removeprefix(DATA_PREFIX)
    return None


@failure(
    "data-claim-missing",
    seen="a claim of a data volume that the run mounts and that does not exist in the namespace",
    remedy="Create claim {claim} in namespace {namespace}, or set data.volumes.{volume}.claim of the "
    "chart to a claim that exists and submit again.",
)
def data_claim_missing(snapshot: Snapshot) -> Match | None:
    """The claim of a data volume that the run file names does not exist."""
    for claim, found in snapshot.claims.items():
        volume = _data_volume_of(snapshot, claim)
        if found is None and volume is not None and not snapshot.is_over:
            symptom = find(snapshot, re.escape(claim))
            seen = evidence(f"namespace {snapshot.namespace}", f"no PersistentVolumeClaim {claim}")
            return Match(
                cause=f"data volume {volume} is claim {claim}, which does not exist in namespace "
                f"{snapshot.namespace}",
                evidence=(seen, symptom.evidence) if symptom else (seen,),
                values={"claim": claim, "volume": volume},
            )
    return None


@failure(
    "data-mount-failed",
    seen="an event FailedMount or FailedAttachVolume that names a data volume",
    remedy="Look at `kubectl describe pod {pod} -n {namespace}`: the server of the volume must be up, and "
    "the node must have its client (NFS, CSI driver). data.volumes.{volume} of the chart says what is "
    "mounted.",
)
def data_mount_failed(snapshot: Snapshot) -> Match | None:
    """A node cannot mount a data volume that the run file names."""
    for symptom in symptoms(snapshot):
        named = re.search(NAMED_VOLUME, symptom.text)
        if named and symptom.reason in ("FailedMount", "FailedAttachVolume"):
            name = name_of(symptom.pod) if symptom.pod else "POD"
            return Match(
                cause=f"a node cannot mount data volume {named[1]} of {name}",
                evidence=(symptom.evidence,),
                values={"pod": name, "volume": named[1]},
            )
    return None


@failure(
    "claim-missing",
    seen="a claim that the pods mount and that does not exist in the namespace",
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
                cause=f"the pods mount claim {name}, which does not exist in namespace {snapshot.namespace}",
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
    remedy="Use a storage class whose volumes several nodes can write (ReadWriteMany: NFS, CephFS, "
    "EFS, Filestore), or keep the folders of runs in a bucket (storage.s3).",
)
def access_mode(snapshot: Snapshot) -> Match | None:
    """Nodes cannot share the storage: ReadWriteMany is not available, or was not requested."""
    symptom = find(snapshot, any_of("Multi-Attach error", "ReadWriteOncePod access mode"))
    if symptom is not None:
        return Match(
            cause="several nodes or pods need a volume that only one may mount",
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
    remedy="Look at `kubectl describe pvc {claim} -n {namespace}`: the cluster needs a provisioner "
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
            continue  # WaitForFirstConsumer: the claim is bound when its first pod has a node
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
    "or a bucket): this volume is on one node or in one zone.",
)
def volume_bound_elsewhere(snapshot: Snapshot) -> Match | None:
    """The volume is on one node or in one zone, and the pods need another."""
    symptom = find(
        snapshot, "didn't match PersistentVolume's node affinity|no available volume zone"
    )
    if symptom is None:
        return None
    return Match(
        cause="the volume is bound to one node or zone, which has no room for all pods",
        evidence=(symptom.evidence,),
    )


@failure(
    "mount-failed",
    seen="events FailedMount or FailedAttachVolume of a pod that does not start",
    remedy="Look at `kubectl describe pod {pod} -n {namespace}`: the storage server must be up, and "
    "the node must have its client (NFS, CSI driver).",
)
def mount_failed(snapshot: Snapshot) -> Match | None:
    """A node cannot mount the storage."""
    for symptom in symptoms(snapshot):
        is_mount = symptom.reason in ("FailedMount", "FailedAttachVolume")
        if is_mount and not re.search(
            any_of("secret .* not found", "configmap .* not found"), symptom.text
        ):
            name = name_of(symptom.pod) if symptom.pod else "POD"
            return Match(
                cause=f"a node cannot mount the storage of {name}",
                evidence=(symptom.evidence,),
                values={"pod": name},
            )
    return None
