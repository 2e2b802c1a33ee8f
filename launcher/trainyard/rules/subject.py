"""The object that is checked, a RayJob or a RayCluster, with the fields that several rules read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainyard.rules.field_path import FieldPath, Kuberay

AUTOSCALER_V2 = "RAY_enable_autoscaler_v2"

NEW_IN_1_7 = (
    ("networkPolicy",),
    ("tlsOptions",),
    ("historyServerOptions",),
    ("headGroupSpec", "ingressOptions"),
    ("autoscalerOptions", "command"),
    ("autoscalerOptions", "args"),
    ("gcsFaultToleranceOptions", "backend"),
    ("gcsFaultToleranceOptions", "storage"),
)
"""Fields of a RayCluster that were added in KubeRay 1.7."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The head group or a worker group of a cluster."""

    place: FieldPath
    is_head: bool

    @property
    def name(self) -> str:
        return "the head" if self.is_head else f"group {self.place.at('groupName').text}"

    @property
    def pod(self) -> FieldPath:
        return self.place.at("template", "spec")

    @property
    def containers(self) -> list[FieldPath]:
        return list(self.pod.at("containers").items())

    @property
    def container(self) -> FieldPath:
        """The Ray container: the first one."""
        first = self.pod.at("containers")
        return next(first.items(), FieldPath(f"{first.path}[0]", None))

    def variable(self, *names: str) -> FieldPath | None:
        """Return the first of these environment variables that the Ray container sets; None if it sets
        none."""
        return variable(self.container.at("env"), *names)


@dataclass(frozen=True, slots=True)
class Subject:
    """A parsed RayJob or RayCluster."""

    document: Any
    kuberay: Kuberay
    ray: str | None = None
    """Ray version of the image; None if it is not known."""

    @property
    def is_job(self) -> bool:
        return self.root.at("kind").text == "RayJob"

    @property
    def root(self) -> FieldPath:
        return FieldPath("", self.document)

    @property
    def metadata(self) -> FieldPath:
        return self.root.at("metadata")

    @property
    def job(self) -> FieldPath:
        """The spec of a RayJob; an unset field for a RayCluster."""
        return self.root.at("spec") if self.is_job else FieldPath("spec", None)

    @property
    def cluster(self) -> FieldPath:
        """The spec of the RayCluster, or of the RayCluster that the RayJob creates."""
        return self.root.at("spec", "rayClusterSpec") if self.is_job else self.root.at("spec")

    @property
    def mode(self) -> str:
        """The submission mode of the job, with KubeRay's default."""
        return self.job.at("submissionMode").text or "K8sJobMode"

    @property
    def selects_cluster(self) -> bool:
        return bool(self.job.at("clusterSelector").value)

    @property
    def head(self) -> Group:
        return Group(place=self.cluster.at("headGroupSpec"), is_head=True)

    @property
    def workers(self) -> list[Group]:
        specs = self.cluster.at("workerGroupSpecs")
        return [Group(place=place, is_head=False) for place in specs.items()]

    @property
    def groups(self) -> list[Group]:
        """The head group and the worker groups; empty if the object creates no cluster."""
        return [self.head, *self.workers] if self.cluster.is_set else []

    @property
    def places_new_in_1_7(self) -> list[FieldPath]:
        """The fields that were added in KubeRay 1.7, whether they are set or not."""
        places = [self.cluster.at(*keys) for keys in NEW_IN_1_7]
        return places + [group.place.at("priority") for group in self.workers]

    @property
    def autoscales(self) -> bool:
        return self.cluster.at("enableInTreeAutoscaling").is_true

    @property
    def names_autoscaler_v2(self) -> bool:
        return self.cluster.at("autoscalerOptions", "version").text == "v2"

    @property
    def has_autoscaler_v2(self) -> bool:
        """Whether version 2 of the autoscaler is selected, by its option or by the variable."""
        asked = self.head.variable(AUTOSCALER_V2)
        by_variable = asked is not None and asked.at("value").text in ("1", "true")
        return self.names_autoscaler_v2 or by_variable


def variable(env: FieldPath, *names: str) -> FieldPath | None:
    """Return the first entry of an `env` list with one of these names; None if there is none."""
    return next((one for one in env.items() if one.at("name").text in names), None)
