"""Read what a run's folder tells of its submission, and render the same RayJob or run file again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainyard.errors import ConfigError
from trainyard.planning.objects import run_objects_with_code
from trainyard.platform import Platform
from trainyard.run_file.code.code_archive import Overlay
from trainyard.run_file.code.source import GitState
from trainyard.run_file.models import RUN_MODELS, RunConfig, UserCodeRun
from trainyard.run_file.validation import validate
from trainyard_trainer.config.scaling import RECIPE_FAULTS
from trainyard_trainer.config.section import Section
from trainyard_trainer.config.trainer_config import kinds_of
from trainyard_trainer.run_files import submission
from trainyard_trainer.run_files.standing_cluster import driver_variables

Object = dict[str, Any]

NOTHING = "-"
"""Stands for the hash of a part that does not exist."""


class SubmissionFile(Section):
    """The content of submission.json, which the driver writes."""

    config: dict[str, Any]
    """The config of the trainer."""

    launch: dict[str, Any]
    """The other keys of the run file, with the image and the pools that were chosen."""

    parts: dict[str, str]
    """The hash of each part of the RayJob."""

    git: GitState | None = None
    """The git revision that came with the RayJob; None if it had none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A submission that can be rendered again."""

    run: RunConfig
    code_sha256: str | None
    parts: Mapping[str, str]
    """The hash of each part of its RayJob; empty for a run that was trained on one machine."""
    git: GitState | None = None
    """The git revision from which it was submitted, if that is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedAgain:
    """A RayJob that was rendered again, the hash of each of its parts, and the warnings about it."""

    job: Object
    parts: Mapping[str, str]
    warnings: tuple[str, ...]


def read_submission(text: str, source: str) -> Submission:
    """Parse the text of submission.json. Raises ConfigError if this launcher cannot read it."""
    written = validate(SubmissionFile, _parse(text, source), source)
    kept = _submission(written.config, written.launch, written.parts, source)
    return replace(kept, git=written.git)


def read_config(text: str, source: str) -> Submission:
    """Parse the text of run.json of a run on this machine, which has neither pools nor queue.

    Raises ConfigError if it is not the config of a run.
    """
    config = _parse(text, source)
    try:
        scaling = config["scaling"]
        most, fewest = scaling["num_workers"], scaling["min_workers"]
        unit = "gpus" if scaling["use_gpu"] else "workers"
    except KeyError as error:
        raise ConfigError(f"{source} has no {error}: it is not what a run leaves") from error
    amount = {"min": fewest, "max": most} if fewest else most
    return _submission(config, {"resources": {unit: amount}}, {}, source)


def _parse(text: str, source: str) -> Object:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{source} must hold a mapping")
    return document


def _submission(
    config: Object, launch: Object, parts: Mapping[str, str], source: str
) -> Submission:
    kind = RUN_MODELS[next(iter(kinds_of(config)), "train")]
    document = {key: value for key, value in config.items() if key in kind.model_fields} | launch
    if issubclass(kind, UserCodeRun):
        document["faults"] = _without(document["faults"], *RECIPE_FAULTS)
    elif document["resources"].get("data") is not None:
        # The plan says where the Ray loader reads.
        document["data"] = _without(document["data"], "ray_nodes")
    return Submission(
        run=validate(kind, document, source), code_sha256=config.get("code_sha256"), parts=parts
    )


def _without(section: Object, *keys: str) -> Object:
    return {name: value for name, value in section.items() if name not in keys}


def code_of_archive(archive: bytes, sha256: str) -> Overlay:
    """Return the packed code of a submission. Raises ConfigError if its SHA-256 differs."""
    found = hashlib.sha256(archive).hexdigest()
    if found != sha256:
        raise ConfigError(
            f"{submission.code_file(sha256)} has the SHA-256 {found[:8]}, and {sha256[:8]} was submitted"
        )
    return Overlay(archive=archive, sha256=sha256)


def render_again(
    run: RunConfig, code: Overlay | None, platform: Platform, namespace: str
) -> RenderedAgain:
    """Render the RayJob of a run whose code is packed already. Raises ConfigError."""
    objects = run_objects_with_code(run, code, platform, namespace)
    parts = json.loads(driver_variables(objects.job)[submission.VARIABLE])["parts"]
    return RenderedAgain(job=objects.job, parts=parts, warnings=objects.warnings)


def changed_parts(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """Yield a text such as `head (1a2b3c4d -> 5e6f7a8b)` for each part whose hash has changed."""
    for part in sorted(before.keys() | after.keys()):
        old, new = before.get(part, NOTHING), after.get(part, NOTHING)
        if old != new:
            yield f"{part} ({old} -> {new})"


def renamed(run: RunConfig, name: str | None) -> RunConfig:
    """Return the run under another name, or the run itself without a name."""
    return run if name is None else run.model_copy(update={"name": name})


def run_file(run: RunConfig, code: str | None) -> Object:
    """Return a run file that repeats the run, as a document; `code` is the folder of its code."""
    document = _said(run.model_dump(mode="json"))
    document["resources"] = _said(document["resources"])
    if limits := _said(document.pop("limits")):
        document["limits"] = limits
    if "notify" in document:
        document["notify"] = _said(document["notify"])
    if isinstance(run, UserCodeRun):
        document["faults"] = _without(document["faults"], *RECIPE_FAULTS)
    return document if code is None else document | {"code": code}


def _said(section: Object) -> Object:
    """Return a section without the keys whose value is None or an empty mapping, which are defaults."""
    return {key: value for key, value in section.items() if value not in (None, {})}
