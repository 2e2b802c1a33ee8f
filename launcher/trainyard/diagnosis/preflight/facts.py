"""The facts that `trainyard preflight` reads from a cluster, and the result of one check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trainyard.diagnosis.catalogue import Finding
from trainyard.platform import DataVolume, Platform
from trainyard_trainer.config.variables import SecretKey

Object = dict[str, Any]
State = Literal["ok", "failed", "not known"]
Right = tuple[str, str, str]
"""A kind, a subresource such as `log`, and a verb."""

RIGHTS: tuple[Right, ...] = (
    *(("RayJob", "", verb) for verb in ("create", "get", "list", "watch", "patch", "delete")),
    *(("RayCluster", "", verb) for verb in ("get", "list")),
    *(("Pod", "", verb) for verb in ("get", "list", "watch", "create", "delete")),
    ("Pod", "log", "get"),
    ("Pod", "exec", "create"),
    ("Pod", "portforward", "create"),
    ("Event", "", "list"),
    ("ConfigMap", "", "get"),
    ("PersistentVolumeClaim", "", "get"),
)  # fmt: skip
"""The permissions that the launcher needs, as in the chart's Role."""

OPERATOR_S = 20.0
"""Seconds within which the operator must set the status of a new RayJob; it needs less than one."""


RECEIVER = "notify.secret"
"""Stands for a variable, for the Secret with the address of `notify`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One condition for a run, and whether it is met."""

    name: str
    """What is checked, such as `nodes`."""
    state: State
    seen: str
    """What was observed, as a clause."""
    remedy: str = ""
    """What to do if the condition is not met; empty if it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """The result of the probe pod."""

    image: str
    storage: str
    """The path of the storage in the pod."""
    refused: str = ""
    """Why the API server refused the pod; empty if it did not."""
    pod: Object | None = None
    claims: Mapping[str, Object | None] = field(default_factory=dict)
    """The PersistentVolumeClaims that the pod mounts, by name; None for one that does not exist."""
    finding: Finding | None = None
    """Why the pod did not start; None if it did."""
    log: str = ""
    record: Object | None = None
    """What the probe program found in the pod."""
    waited_s: float = 0.0
    """For how many seconds the pod was observed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFacts:
    """What was read from a cluster; None stands for what could not be read."""

    namespace: str
    version: Object | None = None
    silence: str = ""
    """Why the cluster does not answer; empty if it does."""
    missing_kinds: tuple[str, ...] = ()
    crd: Object | None = None
    operators: tuple[Object, ...] | None = None
    answered_s: float | None = None
    """Seconds until the operator set the status of a suspended RayJob; None if it was not tried."""
    is_silent: bool = False
    """Whether the operator never set it."""
    rights: Mapping[Right, bool | None] = field(default_factory=dict)
    platform: Platform | None = None
    platform_problem: str = ""
    job: Object | None = None
    """The RayJob of the run file; None without a run file."""
    job_refused: str = ""
    """Why the API server would refuse `job`; empty if it would not."""
    volumes: tuple[DataVolume, ...] = ()
    """The data volumes that the run mounts."""
    claims: Mapping[str, Object | None] = field(default_factory=dict)
    """Their PersistentVolumeClaims by name; None for one that does not exist, none that could not be read."""
    secrets: Mapping[str, SecretKey] = field(default_factory=dict)
    """The keys of Secrets that the run refers to, by variable; that of `notify` by RECEIVER."""
    secret_keys: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    """The names of the keys of each of these Secrets, without values; None for one that does not exist, none
    that could not be read."""
    quotas: tuple[Object, ...] | None = None
    nodes: tuple[Object, ...] | None = None
    pods: tuple[Object, ...] | None = None
    """The pods of all namespaces."""
    probe: Probe | None = None
