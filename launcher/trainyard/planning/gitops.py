"""What Git-driven deployment needs of a RayJob, and how a RayJob shows that such a tool has made it.

A tool that compares a RayJob with Git again and again would set `spec.suspend` back to true after Kueue has
admitted the run, and so end the run.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

Object = dict[str, Any]

GitTool = Literal["flux", "argocd"]

CREATE_ONCE = ("kustomize.toolkit.fluxcd.io/ssa", "IfNotPresent")
"""The annotation by which Flux creates an object and leaves it alone afterwards."""

MANAGERS: Mapping[str, str] = {
    "kustomize-controller": "Flux",
    "argocd-controller": "Argo CD",
    "argocd-application-controller": "Argo CD",
}
"""The field managers of the tools, with the names of the tools."""


def for_git(job: Object, tool: GitTool | None) -> Object:
    """Return a RayJob as it should be in Git for a tool. Its name stays, so it is the same submission."""
    if tool is None:
        return job
    job = copy.deepcopy(job)
    if tool == "flux":
        name, value = CREATE_ONCE
        job["metadata"].setdefault("annotations", {})[name] = value
    else:
        # Kueue's webhook suspends a RayJob with a queue label when it is created.
        job["spec"].pop("suspend", None)
    return job


def is_created_once(job: Mapping[str, Any]) -> bool:
    """Return whether the tool leaves a RayJob alone once it exists."""
    name, value = CREATE_ONCE
    return bool((job["metadata"].get("annotations") or {}).get(name) == value)


def git_tool_of(job: Mapping[str, Any]) -> str | None:
    """Return the name of the tool that has made a RayJob of the cluster; None if none has."""
    managers = (entry.get("manager") for entry in job["metadata"].get("managedFields") or ())
    return next((MANAGERS[manager] for manager in managers if manager in MANAGERS), None)
