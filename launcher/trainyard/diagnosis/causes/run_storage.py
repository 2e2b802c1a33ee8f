"""Failures of the storage that the training program uses: buckets, claims and disks."""

from __future__ import annotations

import re

from trainyard.diagnosis.causes.driver_log import LOG, failed_lines, match_error
from trainyard.diagnosis.failure import Match, any_of, evidence, failure, last_match
from trainyard.diagnosis.snapshot import Snapshot
from trainyard_trainer.run_files.driver_output import STORAGE


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
    found = last_match(failed_lines(snapshot), pattern)
    if found is None:
        return None
    action = re.search(r"during (\w+) operation", found[0])
    asked = f" {action[1]}" if action else ""
    return Match(
        cause=f"the bucket refuses the run{asked}: its keys are wrong, or lack the permission",
        evidence=(evidence(LOG, found[0]),),
    )


@failure(
    "s3-no-bucket",
    seen="`AWS Error NO_SUCH_BUCKET` in the driver's log",
    remedy="Create the bucket, or correct storage.s3.path in the platform's values.",
)
def s3_no_bucket(snapshot: Snapshot) -> Match | None:
    """The bucket of the storage does not exist."""
    found = last_match(failed_lines(snapshot), any_of("NO_SUCH_BUCKET", "NoSuchBucket"))
    if found is None:
        return None
    bucket = re.search(r"in bucket '([^']+)'", found[0]) or re.search(r"s3://([^/ ]+)", found[0])
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
        failed_lines(snapshot),
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
    remedy="Free space with `trainyard checkpoints prune`, remove old runs, or enlarge the claim.",
)
def storage_full(snapshot: Snapshot) -> Match | None:
    """The storage of the runs is full."""
    found = last_match(
        failed_lines(snapshot), any_of("No space left on device", "Disk quota exceeded")
    )
    if found is None or "/dev/shm" in found[0] or "torch_" in found[0]:
        return None
    return Match(cause="the storage is full", evidence=(evidence(LOG, found[0]),))


@failure(
    "node-local-storage",
    seen="a worker's `the claim ... is gone, or was never to be seen`, or `the last intact checkpoint "
    "in ... is missing` though training ended, with a storage path that no shared volume holds",
    remedy="Use storage that all pods share: a claim with ReadWriteMany "
    "(storage.claim), or a bucket (storage.s3).",
)
def node_local_storage(snapshot: Snapshot) -> Match | None:
    """The folders of runs are on a disk of one pod or node, which the other pods cannot read."""
    lost = last_match(
        failed_lines(snapshot),
        r"the last intact checkpoint in \S+ is missing|the claim \S+ is gone|"
        rf"{STORAGE}\S*(lease|checkpoints|run\.json)\S* cannot be \w+: No such file or directory",
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
        cause=f"the other pods cannot read what one pod writes into the run's folder: {why}{where}",
        evidence=(evidence(LOG, lost[0]),),
    )


@failure(
    "storage-unusable",
    seen="the driver's `error: storage: ... cannot be read`, `... cannot be written` and the like",
    remedy="Check that storage.path is a mounted volume or bucket which user 1000 may read and "
    "write (`trainyard preflight -n {namespace}` tries it).",
)
def storage_unusable(snapshot: Snapshot) -> Match | None:
    """The storage cannot be read or written, for a reason that is none of those above."""
    return match_error(snapshot, rf"\b{STORAGE}.* cannot be \w+: ")
