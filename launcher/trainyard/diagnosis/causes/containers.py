"""Failures of containers that do not start: missing Secrets and ConfigMaps, wrong users, missing programs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainyard.diagnosis.failure import Match, evidence, failure, last_match
from trainyard.diagnosis.snapshot import (
    INIT_CONTAINER,
    Object,
    Snapshot,
    is_ready,
    limits,
    name_of,
    terminations,
    waits_for_head,
)
from trainyard.diagnosis.symptoms import Symptom, ended_evidence, find, symptoms

TOKEN_KEY = "auth_token"
"""The key of the Secret with Ray's token."""

BROKEN_SECRET = r'secret "?([\w./-]+)"? not found|couldn\'t find key (\S+) in Secret (\S+)'


@failure(
    "token-secret-missing",
    seen="containers that wait with CreateContainerConfigError about key auth_token or the "
    "cluster's own Secret",
    remedy="The operator creates it: check that it runs and may create Secrets in namespace "
    "{namespace}, then stop and submit again. With authOptions.secretName you "
    "create the Secret: add the key auth_token.",
)
def token_secret_missing(snapshot: Snapshot) -> Match | None:
    """The Secret with Ray's token is missing, or has no key auth_token."""
    clusters = {name_of(cluster) for cluster in snapshot.ray_clusters} | {
        str(snapshot.status.get("rayClusterName"))
    }
    auth = snapshot.spec.get("rayClusterSpec", {}).get("authOptions", {})
    for symptom, secret, key in _broken_secrets(snapshot):
        if key == TOKEN_KEY or secret in clusters or secret == auth.get("secretName"):
            return Match(
                cause=f"Secret {secret} with Ray's token {f'has no key {key}' if key else 'is missing'}",
                evidence=(symptom.evidence,),
            )
    return None


@failure(
    "secret-missing",
    seen="containers that wait with CreateContainerConfigError, pods with FailedMount",
    remedy="Create Secret {secret} in namespace {namespace} with the keys that the run file (secrets) or the "
    "chart's values name (pod; storage.s3.secretName: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY).",
)
def secret_missing(snapshot: Snapshot) -> Match | None:
    """A Secret that the pods need is missing, or lacks a key."""
    for symptom, secret, key in _broken_secrets(snapshot):
        what = f"has no key {key}" if key else "does not exist"
        return Match(
            cause=f"the pods need Secret {secret}, which {what}",
            evidence=(symptom.evidence,),
            values={"secret": secret},
        )
    return None


def _broken_secrets(snapshot: Snapshot) -> Iterator[tuple[Symptom, str, str]]:
    """Symptoms about Secrets: the Secret's name, and the key that it lacks."""
    for symptom in symptoms(snapshot):
        if match := re.search(BROKEN_SECRET, symptom.text):
            yield symptom, (match[1] or match[3]).rpartition("/")[2], match[2] or ""


@failure(
    "config-map-missing",
    seen="containers that wait with CreateContainerConfigError, pods with FailedMount",
    remedy="Create ConfigMap {name} in namespace {namespace}, or remove it from the platform's "
    "rayClusterSpec.",
)
def config_map_missing(snapshot: Snapshot) -> Match | None:
    """A ConfigMap that the pods need is missing."""
    symptom = find(snapshot, r'configmap "?([\w.-]+)"? not found')
    if symptom is None:
        return None
    match = re.search(r'configmap "?([\w.-]+)"? not found', symptom.text)
    name = match[1] if match else ""
    return Match(
        cause=f"the pods need ConfigMap {name}, which does not exist",
        evidence=(symptom.evidence,),
        values={"name": name},
    )


@failure(
    "runs-as-root",
    seen="containers that wait with CreateContainerConfigError about runAsNonRoot",
    remedy="Give the image a numeric user that is not 0 (`USER 1000` in its Dockerfile).",
)
def runs_as_root(snapshot: Snapshot) -> Match | None:
    """The image's user is root or has no number, and the pods may not run as root."""
    symptom = find(snapshot, "runAsNonRoot")
    if symptom is None:
        return None
    return Match(
        cause="the image runs as root or as a user without a number, which the pods forbid",
        evidence=(symptom.evidence,),
    )


@failure(
    "no-shell",
    seen="containers that end with StartError, or wait with RunContainerError",
    remedy="Give the image /bin/bash, ray and python on its PATH: build on train_image/Dockerfile.",
)
def no_shell(snapshot: Snapshot) -> Match | None:
    """The image lacks the program that the operator starts: bash, or ray."""
    pattern = r'exec: "?[\w/.-]+"?: (executable file not found|.*no such file)'
    symptom = find(snapshot, pattern)
    if symptom is not None:
        return Match(
            cause="the image lacks a program that its pods start with",
            evidence=(symptom.evidence,),
        )
    for pod in snapshot.pods:
        for name, ended in terminations(pod):
            text = ended.get("message", "")
            if re.search(pattern, text):
                return Match(
                    cause="the image lacks a program that its pods start with",
                    evidence=(evidence(f"pod {name_of(pod)}, container {name}", text),),
                )
    return None


@failure(
    "init-container-oom",
    seen="init container wait-gcs-ready that ended with OOMKilled, or whose log says that its "
    "`ray health-check` was Killed (cgroup v1 kills that alone)",
    remedy="Its limit of 256 MiB is fixed by the operator. The image of train_image/Dockerfile waits without "
    "Python. In another image reduce the memory of `ray health-check`: with compiled .pyc files and without "
    "imports at start-up (sitecustomize, .pth files) it needs about 190 MB.",
)
def init_container_oom(snapshot: Snapshot) -> Match | None:
    """The operator's init container wait-gcs-ready needs more than its fixed 256 MiB."""
    for pod in snapshot.pods:
        if is_ready(pod):
            continue
        for name, ended in terminations(pod):
            if name == INIT_CONTAINER and ended.get("reason") == "OOMKilled":
                return Match(
                    cause=_too_little(pod),
                    evidence=(ended_evidence(pod, name, ended),),
                )
        killed = last_match(snapshot.init_log.splitlines(), r"\bKilled\b.*health-check")
        if waits_for_head(pod) and killed:
            return Match(
                cause=_too_little(pod),
                evidence=(evidence(f"pod {name_of(pod)}, container {INIT_CONTAINER}", killed[0]),),
            )
    return None


def _too_little(pod: Object) -> str:
    limit = limits(pod, INIT_CONTAINER).get("memory", "256Mi")
    return (
        f"{INIT_CONTAINER} of {name_of(pod)} was killed at its memory limit of {limit}: workers cannot "
        "start"
    )


@failure(
    "container-crash",
    seen="containers that end again and again (CrashLoopBackOff), or cannot be started",
    remedy="Read the end of its log: `kubectl logs {pod} -c {container} --previous -n {namespace}`.",
)
def container_crash(snapshot: Snapshot) -> Match | None:
    """A container ends again and again, or cannot be started, for another reason."""
    reasons = (
        "CrashLoopBackOff",
        "RunContainerError",
        "CreateContainerError",
        "CreateContainerConfigError",
        "FailedCreatePodSandBox",
        "StartError",
    )
    symptom = find(snapshot, "", reasons)
    if symptom is None or symptom.pod is None:
        return None
    seen = [symptom.evidence]
    for name, ended in terminations(symptom.pod):
        if name == symptom.container:
            seen.append(ended_evidence(symptom.pod, name, ended))
    return Match(
        cause=f"container {symptom.container} of {name_of(symptom.pod)} keeps ending, or cannot be started",
        evidence=tuple(seen),
        values={"pod": name_of(symptom.pod), "container": symptom.container or "ray-head"},
    )
