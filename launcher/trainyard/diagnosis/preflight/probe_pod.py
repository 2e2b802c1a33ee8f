"""Checks of the probe pod: admission, storage, node, image, and what the program in it reports."""

from __future__ import annotations

from collections.abc import Iterator

from trainyard.diagnosis.activity import duration
from trainyard.diagnosis.catalogue import CHAPTERS, NODES
from trainyard.diagnosis.preflight.facts import Check, ClusterFacts, Object, Probe, State

CLAIM_FAILURES = (
    "claim-missing", "wrong-storage-class", "access-mode", "claim-unbound", "mount-failed",
)  # fmt: skip
"""The failures of `explain` that concern the PersistentVolumeClaims of the storage."""

NODE_FAILURES = tuple(
    failure.name for title, chapter in CHAPTERS if title == NODES for failure in chapter
)
"""The failures of `explain` because of which no node runs the pod."""


def check_probe(facts: ClusterFacts) -> Iterator[Check]:
    """Check what the probe pod shows: admission, storage, node, image and the programs in the image."""
    probe = facts.probe
    names = ("Pod Security", "claim", "node", "image", "programs", "storage", "Ray version")
    if probe is None:
        yield from (
            Check(name=name, state="not known", seen="no probe pod was created") for name in names
        )
        return
    if probe.refused:
        yield Check(
            name="Pod Security",
            state="failed",
            seen=probe.refused,
            remedy="Correct what the message names: the pods of a run are refused for the same reason.",
        )
        yield from (
            Check(name=name, state="not known", seen="the probe pod was refused")
            for name in names[1:]
        )
        return
    yield Check(name="Pod Security", state="ok", seen="the API server accepted the probe pod")
    yield _check_claim(probe)
    yield _check_node(probe)
    yield _check_image(probe)
    yield from _check_program(facts, probe, probe.record)


def _check_claim(probe: Probe) -> Check:
    """Check that the PersistentVolumeClaims of the storage are bound."""
    if probe.finding is not None and probe.finding.failure in CLAIM_FAILURES:
        return Check(
            name="claim", state="failed", seen=probe.finding.cause, remedy=probe.finding.remedy
        )
    if not probe.claims:
        return Check(name="claim", state="ok", seen=f"none: the storage is {probe.storage}")
    bound = [
        f"{name} is {((claim or {}).get('status') or {}).get('phase', 'missing')}"
        for name, claim in probe.claims.items()
    ]
    is_bound = all(text.endswith(" is Bound") for text in bound)
    return Check(name="claim", state="ok" if is_bound else "not known", seen=", ".join(bound))


def _check_node(probe: Probe) -> Check:
    """Check that a node runs the probe pod, which has the node selector and tolerations of a head."""
    name = "node"
    finding = probe.finding
    if finding is not None and finding.failure in NODE_FAILURES:
        return Check(name=name, state="failed", seen=finding.cause, remedy=finding.remedy)
    node = ((probe.pod or {}).get("spec") or {}).get("nodeName")
    if node:
        return Check(name=name, state="ok", seen=f"{node} runs the probe pod")
    return Check(name=name, state="not known", seen="the probe pod did not get this far")


def _check_image(probe: Probe) -> Check:
    """Check that the image is pulled and its container starts."""
    finding = probe.finding
    if finding is not None and finding.failure in (*CLAIM_FAILURES, *NODE_FAILURES):
        return Check(name="image", state="not known", seen="the probe pod did not get this far")
    if finding is not None:
        return Check(name="image", state="failed", seen=finding.cause, remedy=finding.remedy)
    if probe.record is None and not probe.log:
        return Check(
            name="image",
            state="failed",
            seen=f"the probe pod has not started within {duration(probe.waited_s)}",
            remedy="See `kubectl describe pod` while `trainyard preflight` runs.",
        )
    return Check(name="image", state="ok", seen=f"{probe.image} was pulled and starts")


def _check_program(facts: ClusterFacts, probe: Probe, record: Object | None) -> Iterator[Check]:
    """Check what the program in the probe pod has reported: programs, storage, version of Ray."""
    if record is None:
        state: State = "failed" if probe.log else "not known"
        seen = " ".join(probe.log.split())[-300:] or "the probe pod did not get this far"
        remedy = (
            "Build the image from train_image/ of this version (`make image`)." if probe.log else ""
        )
        yield Check(name="programs", state=state, seen=seen, remedy=remedy)
        for name in ("storage", "Ray version"):
            yield Check(name=name, state="not known", seen="the probe did not get this far")
        return
    missing = [name for name, path in record["programs"].items() if path is None]
    yield Check(
        name="programs",
        state="failed" if missing else "ok",
        seen=f"the image has no {', '.join(missing)}" if missing else ", ".join(record["programs"]),
        remedy="Put them on the image's PATH: build on train_image/Dockerfile." if missing else "",
    )
    broken = {step: result for step, result in record["storage"].items() if result != "ok"}
    yield Check(
        name="storage",
        state="failed" if broken else "ok",
        seen="; ".join(f"{step}: {result}" for step, result in broken.items())
        or f"{probe.storage}: {', '.join(record['storage'])}",
        remedy="User 1000 (or the Secret's keys) must be able to list, read, write and delete there."
        if broken
        else "",
    )
    found, wanted = record["versions"].get("ray"), facts.platform and facts.platform.ray_version
    is_equal = found == wanted
    yield Check(
        name="Ray version",
        state="ok" if is_equal else "failed",
        seen=f"{found or 'none'} in the image, {wanted} in the platform",
        remedy=""
        if is_equal
        else "Set rayVersion of the platform to the image's Ray, or use the other image.",
    )
