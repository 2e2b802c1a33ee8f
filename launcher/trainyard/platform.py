"""The platform: what the chart publishes, from its ConfigMap or a file.

`PACKAGED` is the chart at its default values, so that `plan` and `render` need no cluster.
"""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from trainyard.errors import ClusterError, ConfigError
from trainyard.run_file.models import Image
from trainyard.run_file.network import RDMA_PRESETS, Network, NetworkPreset
from trainyard.run_file.queue import QueueName, System
from trainyard.run_file.validation import validate
from trainyard.run_file.yaml_text import parse_mapping, read_yaml
from trainyard_trainer.config.storage import Storage

FORMAT_VERSION = 1
CONFIG_MAP = "trainyard-platform"
CONFIG_MAP_KEY = "platform.yaml"
PACKAGED = "packaged"

Cpus = Annotated[float, Field(gt=0, strict=False, allow_inf_nan=False)]


class PlatformSection(BaseModel):
    """A part of the platform: closed and frozen, written in camelCase like all of Kubernetes."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        alias_generator=to_camel,
    )


class PoolNetwork(Network):
    """How the nodes of a pool communicate. The `network` section of a run file changes single
    fields of it."""

    model_config = ConfigDict(alias_generator=to_camel)

    preset: NetworkPreset
    """`tcp`, or RDMA: `infiniband`, `roce` or `efa`."""

    @model_validator(mode="after")
    def _rdma_names_its_devices(self) -> PoolNetwork:
        if self.preset in RDMA_PRESETS and self.resource is None:
            raise PydanticCustomError(
                "one_of",
                f"the preset {self.preset} needs resource: the resource name under which nodes offer their "
                "devices, such as rdma/hca_shared_devices_a",
            )
        return self


class PlatformQueue(PlatformSection):
    """The queue system of the cluster."""

    system: System = "none"
    """Which one it is."""

    name: QueueName | Literal[""] = ""
    """The queue of a run that names none; "" where each run must."""


class Pool(PlatformSection):
    """Nodes of one shape; the sizes are those of a Ray pod that fills a node."""

    name: str
    """Also the worker group's name in `rayClusterSpec`."""

    gpus_per_node: Annotated[int, Field(ge=0)]
    """GPUs of a node; 0 for a pool of CPU workers."""

    gpu_resource: str | None = None
    """The extended resource that counts its GPUs, such as `nvidia.com/gpu`."""

    workers_per_node: PositiveInt | None = None
    """CPU workers of a node; in a GPU pool one worker starts per GPU."""

    cpus: Cpus
    """CPU limit."""

    cpu_request: Cpus
    """CPU request, at most the limit."""

    memory_gib: PositiveInt
    """Memory request and limit."""

    ephemeral_storage_gib: PositiveInt | None = None
    """Disk of the node that a pod may fill, request and limit; without it, none is asked for."""

    network: PoolNetwork | None = None
    """How its nodes talk to each other; without it, as NCCL and gloo find out."""

    @model_validator(mode="after")
    def _workers_are_counted(self) -> Pool:
        if self.gpus_per_node and (self.gpu_resource is None or self.workers_per_node):
            raise PydanticCustomError("one_of", "a GPU pool has gpuResource and no workersPerNode")
        if not self.gpus_per_node and (self.gpu_resource or self.workers_per_node is None):
            raise PydanticCustomError("one_of", "a CPU pool has workersPerNode and no gpuResource")
        return self

    @property
    def slots(self) -> int:
        """Workers that fill a node."""
        return self.gpus_per_node or self.workers_per_node or 0

    @property
    def unit(self) -> str:
        """What a run counts in this pool."""
        return "GPUs" if self.gpus_per_node else "workers"


class Head(PlatformSection):
    """Size of the Ray head, which carries the driver and no worker."""

    cpus: Cpus
    """CPU limit."""

    cpu_request: Cpus
    """CPU request."""

    memory_gib: PositiveInt
    """Memory without any worker."""

    memory_mib_per_worker: Annotated[int, Field(ge=0)]
    """Memory that each worker adds."""

    workers_per_cpu: PositiveInt = 512
    """Workers for which the head gets one CPU more, limit and request."""


class Autoscaler(PlatformSection):
    """Ray's autoscaler beside the head: what an elastic run adds to the shape."""

    options: dict[str, Any]
    """`autoscalerOptions` of the RayCluster: its size, security and mounts."""

    volumes: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    """Volumes of the head pod that it alone mounts, such as the token for the API server."""


class DefaultPools(PlatformSection):
    """The pool of a run that names none."""

    gpus: str
    """For `resources.gpus`."""

    workers: str
    """For `resources.workers`."""


class JobLifeCycle(PlatformSection):
    """Life cycle of a RayJob."""

    pre_running_deadline_seconds: PositiveInt
    """A cluster that has not started by then counts as a failed attempt."""

    ttl_seconds_after_finished: Annotated[int, Field(ge=0)]
    """How long the cluster stays after the end."""

    keep_head_seconds_after_failure: Annotated[int, Field(ge=0)] = 3600
    """How long the head stays after a failure; the workers go at once."""

    separate_attempts: bool = False
    """Whether the pods of an attempt keep off nodes that still hold pods of another one of their
    run."""


Pattern = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/*-]+$")]
"""A pattern of names, in which `*` stands for any number of characters."""

Patterns = Annotated[tuple[Pattern, ...], Field(strict=False)]
"""Patterns, of which a name matches at least one or none."""


class DataVolume(PlatformSection):
    """A volume with data that runs may mount by its name."""

    name: str
    """The name in `data.volumes` of the chart, and in `volumes` of a run file."""

    volume: dict[str, Any]
    """The volume of a pod."""

    mount: dict[str, Any]
    """Its mount in the Ray container."""

    @model_validator(mode="after")
    def _mount_is_that_of_the_volume(self) -> DataVolume:
        if not self.volume.get("name") == self.mount.get("name") is not None:
            raise PydanticCustomError("one_of", "volume and mount must have the same name")
        if not isinstance(self.mount.get("mountPath"), str):
            raise PydanticCustomError("one_of", "mount must have a mountPath")
        return self

    @property
    def claim(self) -> str | None:
        """The name of its PersistentVolumeClaim; None for a volume of another kind."""
        claim = self.volume.get("persistentVolumeClaim") or {}
        return claim.get("claimName")

    @property
    def source(self) -> str:
        """What the volume is, in words such as `claim imagenet-ro` or `csi`."""
        if self.claim is not None:
            return f"claim {self.claim}"
        return ", ".join(sorted(self.volume.keys() - {"name"}))


class RunVariables(PlatformSection):
    """Which environment variables a run file may set."""

    deny: Patterns = ("*",)
    """Names that it may not set."""


class RunPermissions(PlatformSection):
    """What a run file may set of its pods beyond their sizes: nothing, unless the chart says so."""

    env: RunVariables = RunVariables()
    """Environment variables: the keys `env` and `secrets`."""

    volumes: Patterns = ()
    """Data volumes that it may mount: the key `volumes`."""

    secrets: Patterns = ()
    """Secrets whose keys it may take: the key `secrets`."""

    labels: Patterns = ()
    """Keys of labels and annotations that it may set: the keys `labels` and `annotations`."""


class Platform(PlatformSection):
    """All that a run takes from its cluster."""

    format_version: int
    """Version of this format."""

    kuberay: Literal["1.6", "1.7"]
    """Minor version of the KubeRay operator."""

    ray_version: str
    """Ray in the image."""

    image: Image
    """Image of all pods, unless a run file names one."""

    storage: Storage
    """Where the folders of runs lie, as the pods see it."""

    pools: Annotated[tuple[Pool, ...], Field(strict=False)]
    """The pools of nodes."""

    default_pools: DefaultPools
    """The pool of a run that names none."""

    head: Head
    """Size of the Ray head."""

    job: JobLifeCycle
    """Life cycle of a RayJob."""

    data_volumes: Annotated[tuple[DataVolume, ...], Field(strict=False)] = ()
    """Volumes with data that a run mounts by their names."""

    runs: RunPermissions = RunPermissions()
    """What a run file may set of its pods beyond their sizes."""

    queue: PlatformQueue = PlatformQueue()
    """The queue system of the cluster."""

    ray_cluster_spec: dict[str, Any]
    """The shape: a whole RayCluster spec with one worker group per pool."""

    autoscaler: Autoscaler | None = None
    """What an elastic run adds to the shape; without it there are none."""

    reader_pod: dict[str, Any]
    """The pod that reads a run's folder."""

    @field_validator("ray_cluster_spec")
    @classmethod
    def _shape_has_its_places(cls, shape: dict[str, Any]) -> dict[str, Any]:
        try:
            groups = [shape["headGroupSpec"], *shape["workerGroupSpecs"]]
            complete = all(group["template"]["spec"]["containers"] for group in groups)
            complete = complete and all(group["groupName"] for group in groups[1:])
        except (KeyError, TypeError):
            complete = False
        if not complete:
            raise PydanticCustomError(
                "shape",
                "must have headGroupSpec and workerGroupSpecs, each with a template that has a container",
            )
        return shape

    @field_validator("reader_pod")
    @classmethod
    def _reader_has_its_places(cls, pod: dict[str, Any]) -> dict[str, Any]:
        try:
            complete = "metadata" in pod and bool(pod["spec"]["containers"])
        except (KeyError, TypeError):
            complete = False
        if not complete:
            raise PydanticCustomError("shape", "must be a Pod with metadata and a container")
        return pod

    @model_validator(mode="after")
    def _default_pools_exist(self) -> Platform:
        names = {pool.name for pool in self.pools}
        for key, name in self.default_pools:
            if name not in names:
                raise PydanticCustomError(
                    "one_of", f"defaultPools.{key} = {name!r} is none of its pools"
                )
        return self

    def pool(self, name: str, key: str = "resources.pool") -> Pool:
        """The pool that a key of the run file names. Raises ConfigError that lists the others."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise ConfigError(
            f"{key} = {name!r} is no pool of the platform",
            f"Pools: {', '.join(pool.name for pool in self.pools)}.",
        )

    def data_volume(self, name: str) -> DataVolume:
        """The data volume that `volumes` of a run file names. Raises ConfigError that lists the others."""
        for volume in self.data_volumes:
            if volume.name == name:
                return volume
        known = ", ".join(volume.name for volume in self.data_volumes) or "none"
        raise ConfigError(
            f"volumes: {name} is no data volume of the platform",
            f"Data volumes: {known}. The platform's administrator adds one to data.volumes of the chart.",
        )

    def worker_group(self, pool: str) -> dict[str, Any]:
        """The shape of a pool's Ray pods. Raises ConfigError that lists the others."""
        groups: list[dict[str, Any]] = self.ray_cluster_spec["workerGroupSpecs"]
        for group in groups:
            if group["groupName"] == pool:
                return group
        raise ConfigError(
            f"the platform's rayClusterSpec has no worker group for pool {pool}",
            f"Groups: {', '.join(group['groupName'] for group in groups)}.",
        )


def parse_platform(text: str, source: str) -> Platform:
    """The platform in a YAML text. Raises ConfigError that names the source."""
    return _validate(parse_mapping(text, source), source)


def load_platform(path: Path | None) -> Platform:
    """The platform of a file, or the packaged one."""
    if path is not None:
        return _validate(read_yaml(path), str(path))
    with as_file(files("trainyard") / "platform.yaml") as packaged:
        return _validate(read_yaml(packaged), PACKAGED)


def platform_of_config_map(config_map: dict[str, Any] | None, namespace: str) -> Platform:
    """The platform that the chart published in a namespace. Raises ClusterError where it did
    not."""
    if config_map is None:
        raise ClusterError(
            f"namespace {namespace} has no ConfigMap {CONFIG_MAP}: trainyard is not installed there",
            f"Install it with `make platform NAMESPACE={namespace}`, "
            "or name a platform with --platform FILE.",
            reason="NotFound",
        )
    source = f"ConfigMap {namespace}/{CONFIG_MAP}"
    text = (config_map.get("data") or {}).get(CONFIG_MAP_KEY)
    if text is None:
        raise ConfigError(
            f"{source} has no key {CONFIG_MAP_KEY}: it is not what the chart publishes",
            f"Install the chart again: `make platform NAMESPACE={namespace}`.",
        )
    return parse_platform(text, source)


def _validate(document: dict[str, Any], source: str) -> Platform:
    if document.get("formatVersion") != FORMAT_VERSION:
        raise ConfigError(
            f"{source} has platform format version {document.get('formatVersion')!r}, "
            f"this launcher reads {FORMAT_VERSION}",
            "Upgrade the older of the two: the launcher, or the chart (`make platform`).",
        )
    return validate(Platform, document, source)
