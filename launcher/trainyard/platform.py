"""The platform, as the chart publishes it in a ConfigMap: pools, storage and the shape of a RayCluster.

A platform is read from the ConfigMap, from a file, or from this package. The packaged platform has the
default values of the chart, so that `plan` and `render` need no cluster.
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
from trainyard_trainer.config.notify import Notify
from trainyard_trainer.config.storage import Storage

FORMAT_VERSION = 1
CONFIG_MAP = "trainyard-platform"
CONFIG_MAP_KEY = "platform.yaml"
PACKAGED = "packaged"

Cpus = Annotated[float, Field(gt=0, strict=False, allow_inf_nan=False)]


class PlatformSection(BaseModel):
    """The base class of the sections. Keys are in camelCase, and unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        alias_generator=to_camel,
        defer_build=True,
    )


class PoolNetwork(Network):
    """How the nodes of a pool communicate. The section `network` of a run file overrides single keys."""

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
    """Its name; `none` if the cluster has no queue system."""

    name: QueueName | Literal[""] = ""
    """The queue of a run whose run file names none. If it is empty, each run file must name one."""

    elastic: bool = False
    """Whether Kueue takes elastic runs, by its feature gate ElasticJobsViaWorkloadSlices."""


class Pool(PlatformSection):
    """A pool of nodes of one shape. All sizes are those of a Ray pod that fills a node."""

    name: str
    """The name of the pool, and of its worker group in `rayClusterSpec`."""

    gpus_per_node: Annotated[int, Field(ge=0)]
    """The number of GPUs of a node; 0 for a pool of CPU workers."""

    gpu_resource: str | None = None
    """The extended resource of the GPUs, such as `nvidia.com/gpu`."""

    gpu_memory_gib: PositiveInt | None = None
    """The memory of one GPU, if the platform's values name it."""

    workers_per_node: PositiveInt | None = None
    """The number of CPU workers of a node. A GPU pool has one worker per GPU."""

    cpus: Cpus
    """The CPU limit of a pod that fills a node."""

    cpu_request: Cpus
    """The CPU request of that pod, at most the limit."""

    memory_gib: PositiveInt
    """The memory of that pod, as request and as limit."""

    ephemeral_storage_gib: PositiveInt | None = None
    """The disk space of that pod, as request and as limit; without it, the pod has neither."""

    network: PoolNetwork | None = None
    """How the nodes communicate; without it, NCCL and gloo choose the network interface."""

    @model_validator(mode="after")
    def _workers_are_counted(self) -> Pool:
        if self.gpus_per_node and (self.gpu_resource is None or self.workers_per_node):
            raise PydanticCustomError("one_of", "a GPU pool has gpuResource and no workersPerNode")
        if not self.gpus_per_node and (self.gpu_resource or self.workers_per_node is None):
            raise PydanticCustomError("one_of", "a CPU pool has workersPerNode and no gpuResource")
        if not self.gpus_per_node and self.gpu_memory_gib:
            raise PydanticCustomError("one_of", "a CPU pool has no gpuMemoryGib")
        return self

    @property
    def slots(self) -> int:
        """The number of workers that fill a node."""
        return self.gpus_per_node or self.workers_per_node or 0

    @property
    def unit(self) -> str:
        """The unit in which a run file states the size of a run in this pool."""
        return "GPUs" if self.gpus_per_node else "workers"


class Head(PlatformSection):
    """The size of the Ray head, on which the driver and no worker runs."""

    cpus: Cpus
    """The CPU limit of a head without workers."""

    cpu_request: Cpus
    """The CPU request of a head without workers."""

    memory_gib: PositiveInt
    """The memory of a head without workers."""

    memory_mib_per_worker: Annotated[int, Field(ge=0)]
    """The memory that is added for each worker."""

    workers_per_cpu: PositiveInt = 512
    """The number of workers for which one CPU is added to limit and request."""


class Autoscaler(PlatformSection):
    """Ray's autoscaler, a container of the head pod of an elastic run."""

    options: dict[str, Any]
    """`autoscalerOptions` of the RayCluster: size, security and mounts of the container."""

    volumes: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    """Volumes of the head pod for this container only, such as the token for the API server."""


class StandingCluster(PlatformSection):
    """The standing RayCluster, which runs may share."""

    name: str
    """The name of the RayCluster."""

    pool: str
    """The pool of its workers. Each worker pod fills a node."""

    nodes: PositiveInt
    """The number of its worker pods."""

    idle_minutes: PositiveInt | None = None
    """The minutes without a run after which the worker pods are deleted until the next run; None: never."""


class DefaultPools(PlatformSection):
    """The pools of runs whose run file names no pool."""

    gpus: str
    """The pool of a run with `resources.gpus`."""

    workers: str
    """The pool of a run with `resources.workers`."""


class JobLifeCycle(PlatformSection):
    """The deadlines and the clean-up of a RayJob."""

    pre_running_deadline_seconds: PositiveInt
    """The seconds in which a RayCluster has to start; after that, the attempt has failed."""

    ttl_seconds_after_finished: Annotated[int, Field(ge=0)]
    """The seconds after the end of a run until its RayCluster is deleted."""

    keep_head_seconds_after_failure: Annotated[int, Field(ge=0)] = 3600
    """The seconds after a failure until the head is deleted; the workers are deleted at once."""

    separate_attempts: bool = False
    """Whether the pods of an attempt avoid nodes with pods of another attempt of the same run."""


Pattern = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/*-]+$")]
"""A pattern of names, in which `*` stands for any number of characters."""

Patterns = Annotated[tuple[Pattern, ...], Field(strict=False)]
"""A list of patterns. A name matches the list if it matches at least one of them."""


class DataVolume(PlatformSection):
    """A volume with data that runs may mount by its name."""

    name: str
    """The name in `data.volumes` of the chart, and in `volumes` of a run file."""

    volume: dict[str, Any]
    """The volume, as in `spec.volumes` of a pod."""

    mount: dict[str, Any]
    """The mount of the volume, as in `volumeMounts` of the Ray container."""

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
        """The kind of the volume as text, such as `claim imagenet-ro` or `csi`."""
        if self.claim is not None:
            return f"claim {self.claim}"
        return ", ".join(sorted(self.volume.keys() - {"name"}))


class RunVariables(PlatformSection):
    """The environment variables that a run file may set."""

    deny: Patterns = ("*",)
    """The names of variables that it may not set."""


class RunPermissions(PlatformSection):
    """What a run file may set of its pods beyond their sizes. By default it is nothing."""

    env: RunVariables = RunVariables()
    """The environment variables that the keys `env` and `secrets` may set."""

    volumes: Patterns = ()
    """The data volumes that the key `volumes` may mount."""

    secrets: Patterns = ()
    """The Secrets that the key `secrets` may name."""

    labels: Patterns = ()
    """The keys of labels and annotations that `labels` and `annotations` may set."""


class Platform(PlatformSection):
    """What the chart has configured for the runs of a namespace."""

    format_version: int
    """The version of this format."""

    kuberay: Literal["1.6", "1.7"]
    """The minor version of the KubeRay operator."""

    ray_version: str
    """The version of Ray in the image."""

    image: Image
    """The image of all pods, unless a run file names another one."""

    storage: Storage
    """The storage with the folders of the runs, as the pods see it."""

    pools: Annotated[tuple[Pool, ...], Field(strict=False)]
    """The pools of nodes."""

    default_pools: DefaultPools
    """The pools of runs whose run file names no pool."""

    head: Head
    """The size of the Ray head."""

    job: JobLifeCycle
    """The deadlines and the clean-up of a RayJob."""

    data_volumes: Annotated[tuple[DataVolume, ...], Field(strict=False)] = ()
    """The data volumes that runs may mount by their names."""

    runs: RunPermissions = RunPermissions()
    """What a run file may set of its pods beyond their sizes."""

    queue: PlatformQueue = PlatformQueue()
    """The queue system of the cluster."""

    notify: Notify | None = None
    """The receiver of a message at the end of each run whose run file has no `notify`."""

    ray_cluster_spec: dict[str, Any]
    """The shape of a run's RayCluster: a complete spec with one worker group per pool."""

    standing_cluster: StandingCluster | None = None
    """The standing RayCluster; without it, runs with `resources.cluster` are refused."""

    autoscaler: Autoscaler | None = None
    """Ray's autoscaler; without it, elastic runs are refused."""

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
    def _named_pools_exist(self) -> Platform:
        names = {pool.name for pool in self.pools}
        for key, name in self.default_pools:
            if name not in names:
                raise PydanticCustomError(
                    "one_of", f"defaultPools.{key} = {name!r} is none of its pools"
                )
        standing = self.standing_cluster
        if standing is not None and standing.pool not in names:
            raise PydanticCustomError(
                "one_of", f"standingCluster.pool = {standing.pool!r} is none of its pools"
            )
        return self

    def pool(self, name: str, key: str = "resources.pool") -> Pool:
        """Return a pool by its name. Raises ConfigError that names the key and lists all pools."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise ConfigError(
            f"{key} = {name!r} is no pool of the platform",
            f"Pools: {', '.join(pool.name for pool in self.pools)}.",
        )

    def data_volume(self, name: str) -> DataVolume:
        """Return a data volume by its name. Raises ConfigError that lists all data volumes."""
        for volume in self.data_volumes:
            if volume.name == name:
                return volume
        known = ", ".join(volume.name for volume in self.data_volumes) or "none"
        raise ConfigError(
            f"volumes: {name} is no data volume of the platform",
            f"Data volumes: {known}. The platform's administrator adds one to data.volumes of the chart.",
        )

    def worker_group(self, pool: str) -> dict[str, Any]:
        """Return the worker group of a pool in the shape. Raises ConfigError that lists all groups."""
        groups: list[dict[str, Any]] = self.ray_cluster_spec["workerGroupSpecs"]
        for group in groups:
            if group["groupName"] == pool:
                return group
        raise ConfigError(
            f"the platform's rayClusterSpec has no worker group for pool {pool}",
            f"Groups: {', '.join(group['groupName'] for group in groups)}.",
        )


def parse_platform(text: str, source: str) -> Platform:
    """Return the platform in a YAML text. Raises ConfigError that names the source."""
    return _validate(parse_mapping(text, source, of_helm=True), source)


def load_platform(path: Path | None) -> Platform:
    """Return the platform in a file, or the packaged platform without a path."""
    if path is not None:
        return _validate(read_yaml(path, of_helm=True), str(path))
    with as_file(files("trainyard") / "platform.yaml") as packaged:
        return _validate(read_yaml(packaged, of_helm=True), PACKAGED)


def platform_of_config_map(config_map: dict[str, Any] | None, namespace: str) -> Platform:
    """Return the platform in the ConfigMap of a namespace. Raises ClusterError if there is no ConfigMap."""
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
