"""Failures before training begins: image, Ray, config and lease of the run."""

from __future__ import annotations

import re

from trainyard.diagnosis.causes.driver_log import LOG, failed_lines, match_error, match_log
from trainyard.diagnosis.failure import Match, evidence, failure, last_match
from trainyard.diagnosis.snapshot import Snapshot


@failure(
    "missing-python",
    seen="exit code 127 of the entrypoint, `python: not found`",
    remedy="Put `python` (not only python3) on the image's PATH by ENV PATH: build on "
    "train_image/Dockerfile.",
)
def missing_python(snapshot: Snapshot) -> Match | None:
    """The image has no program `python`."""
    pattern = r"python[\d.]*: (command )?not found|exit code 127"
    return match_log(snapshot, pattern, "the image has no `python` on its PATH")


@failure(
    "runtime-env",
    seen="`Failed to start supervisor actor`, `runtime_env setup failed` in the RayJob's message",
    remedy="Correct runtimeEnvYAML of the RayJob. A run needs none: install packages in the image.",
)
def runtime_env(snapshot: Snapshot) -> Match | None:
    """Ray could not set up the runtime environment of the driver (runtime_env)."""
    pattern = r"Failed to start supervisor actor|runtime_env setup failed|RuntimeEnvSetupError"
    found = last_match(failed_lines(snapshot), pattern)
    if found is None:
        return None
    said = found[0].partition("Full traceback")[0].strip()
    return Match(cause=f"Ray could not start the driver: {said}", evidence=(evidence(LOG, said),))


@failure(
    "missing-trainer",
    seen="`No module named trainyard_trainer` in the driver's log",
    remedy="Build the image from train_image/ (`make image IMAGE=...`), or install the package "
    "trainyard_trainer in your own image.",
)
def missing_trainer(snapshot: Snapshot) -> Match | None:
    """The image does not contain the training program."""
    return match_log(
        snapshot,
        r"No module named '?trainyard_trainer'?(\.__main__)?\b",
        "the image does not contain the package `trainyard_trainer`",
    )


@failure(
    "wrong-ray-version",
    seen="Ray's `Version mismatch`; the driver's line `versions:` beside the platform's rayVersion",
    remedy="Set rayVersion of the platform's values to {found}, or use an image with Ray "
    "{wanted}: all pods of a run need the same.",
)
def wrong_ray_version(snapshot: Snapshot) -> Match | None:
    """The image's Ray is not the version that the platform says."""
    if not snapshot.driver_log:
        return None
    wanted = snapshot.ray_version
    lines = snapshot.driver_log.splitlines()
    if last_match(lines, r"Version mismatch: The cluster was started with"):
        versions = re.findall(r"^\s*Ray: (\S+)", snapshot.driver_log, flags=re.MULTILINE)
        if len(set(versions)) > 1:
            return Match(
                cause="the pods of the run have different versions of Ray: "
                f"{' and '.join(dict.fromkeys(versions))}",
                evidence=(
                    evidence(
                        LOG, f"Version mismatch: Ray {', Ray '.join(dict.fromkeys(versions))}"
                    ),
                ),
                values={"found": versions[-1], "wanted": wanted or versions[0]},
            )
    found = last_match(lines, r"^versions: .*\bray ([\d.]+\w*)")
    if found is None or not wanted or found[1][1] == wanted or snapshot.phase == "succeeded":
        return None
    return Match(
        cause=f"the image has Ray {found[1][1]}, and the platform has rayVersion {wanted}",
        evidence=(
            evidence(LOG, found[0]),
            evidence(f"RayJob {snapshot.submission}", f"rayVersion {wanted}"),
        ),
        values={"found": found[1][1], "wanted": wanted},
    )


@failure(
    "other-config",
    seen="the driver's `error: run ... already exists in ... with a different config`",
    remedy="Submit it under another name (`trainyard submit RUN.yaml --name ANOTHER`), or restore "
    "the values that the lines above name.",
)
def other_config(snapshot: Snapshot) -> Match | None:
    """The run's folder holds checkpoints of another config."""
    return match_error(snapshot, r"run \S+ already exists in .* with a different config")


@failure(
    "lease-held",
    seen="the driver's `error: the run ... is being trained already`",
    remedy="Wait for the end of the other attempt, or stop it: `trainyard stop {run} -n "
    "{namespace}`, or the process that the line names.",
)
def lease_held(snapshot: Snapshot) -> Match | None:
    """Another attempt is training the same run, and writes heartbeats."""
    return match_error(snapshot, "is being trained already")


@failure(
    "overtaken",
    seen="the driver's `error: attempt ... has taken over`, `the claim ... is gone`",
    remedy="Do nothing: the newer attempt continues the run. If the folder was removed, submit the run "
    "again.",
)
def overtaken(snapshot: Snapshot) -> Match | None:
    """The attempt was fenced: a newer attempt trains the run, or the run's folder was removed."""
    return match_error(snapshot, r"has taken over from|the claim .* is gone")
