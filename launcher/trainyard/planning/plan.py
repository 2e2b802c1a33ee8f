"""Plan a run on a platform: compute all numbers and names of one submission."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainyard.planning.model_memory import require_memory
from trainyard.planning.permissions import require_permissions
from trainyard.planning.requirements import (
    choose_data_nodes,
    choose_network,
    choose_pools,
    require_data_nodes,
    require_no_spares_if_elastic,
    require_separate_attempts,
    require_shared_source,
    require_shared_weights,
)
from trainyard.planning.sizing.layout import Layout
from trainyard.planning.sizing.pod_sizes import DataGroup, PodSize, head_size
from trainyard.planning.sizing.size_range import layout_range
from trainyard.planning.standing_cluster import (
    choose_standing_cluster,
    layout_on,
    places_of,
    require_no_devices,
)
from trainyard.planning.trainer_input import (
    launch_of,
    trainer_config,
    with_data_nodes,
    with_receiver,
)
from trainyard.platform import DataVolume, Platform, Pool
from trainyard.run_file.code.code_archive import Overlay
from trainyard.run_file.models import (
    BoostingRun,
    NetworkRun,
    OwnRecipeRun,
    RecipeRun,
    RunConfig,
)
from trainyard.run_file.network import (
    Network,
    NetworkRequirements,
    network_requirements,
)
from trainyard.run_file.queue import System, TopologyMode, queue_annotations, queue_labels
from trainyard_trainer.config.scaling import Scaling
from trainyard_trainer.config.trainer_config import AnyConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All numbers and names of one submission, from which the RayJob is made."""

    run: str
    namespace: str
    image: str
    pools: tuple[str, ...]
    """Pools whose nodes the workers may use, the preferred one first."""
    topology_mode: TopologyMode | None
    """How strictly Kueue packs the workers; None as the pool says."""
    gpu_resource: str | None
    nodes: int
    """Number of Ray worker pods; for an elastic run the largest number."""
    min_nodes: int
    """Number of Ray worker pods with which the run starts."""
    spares: int
    """Number of further Ray worker pods, in which workers start when another pod is lost."""
    workers_per_node: int
    cpus_per_worker: int
    node: PodSize
    head: PodSize
    data: DataGroup | None
    retries: int
    queue_system: System
    queue_labels: dict[str, str]
    queue_annotations: dict[str, str]
    """Annotations of the RayJob that the queue system reads."""
    volumes: tuple[DataVolume, ...]
    """Data volumes that the head and all workers mount."""
    network: Network | None
    """The run's `network` combined with its pool's."""
    network_requirements: NetworkRequirements
    """Environment variables and devices of each worker's container."""
    labels: dict[str, str]
    """The run file's labels, of the RayJob and of all pods."""
    annotations: dict[str, str]
    """The run file's annotations, of the same objects."""
    pre_running_deadline_seconds: int
    """Seconds within which all pods of an attempt must be ready."""
    active_deadline_seconds: int | None
    """Seconds after which KubeRay ends an attempt; None for no limit.

    KubeRay counts from the start of the attempt, before its pods are there. The driver counts
    `limits.max_run_s` from its own start, and stops the run before KubeRay does.
    """
    ttl_seconds_after_finished: int
    keep_head_seconds_after_failure: int
    trainer: AnyConfig
    launch: dict[str, Any]
    """The run file's choices that the trainer does not read; see `launch_of`."""
    code: Overlay | None = None
    standing_cluster: str | None = None
    """The name of the standing RayCluster on which the run is trained; None for one of its own."""
    returning_places: int | None = None
    """The number of its places, if it deletes its worker pods while no run uses them; else None."""

    @property
    def pool(self) -> str:
        """The preferred pool, which gives the worker group its name. The others have the same sizes."""
        return self.pools[0]

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    @property
    def gpus(self) -> int:
        """Number of GPUs that train; those of spare pods are not among them."""
        return self.nodes * self.node.gpus

    @property
    def is_elastic(self) -> bool:
        """Whether Ray's autoscaler changes the number of nodes while the run trains."""
        return self.min_nodes < self.nodes

    @property
    def has_staged_cleanup(self) -> bool:
        """Whether workers and head are deleted at different times: not with Kueue or autoscaling.

        A run that its driver has stopped at its limit matches no deletion rule of KubeRay.
        """
        has_limit = self.active_deadline_seconds is not None
        return self.queue_system != "kueue" and not self.is_elastic and not has_limit


def plan_run(
    run: RunConfig, platform: Platform, namespace: str, code: Overlay | None = None
) -> Plan:
    """Plan a run on a platform: distribute its workers over equal Ray pods.

    16 GPUs with 8 per node give 2 pods and 16 workers. Fewer workers than fill a node give one pod with
    their share of the node. `code` is the run's packed code folder. Raises ConfigError with the nearest
    possible sizes if the workers do not fill whole nodes, or cannot divide a batch equally.
    """
    standing = choose_standing_cluster(run, platform)
    pools = choose_pools(run, platform)
    pool = pools[0]
    _require_what_the_platform_has(run, pool, platform)
    data = choose_data_nodes(run, platform)
    if standing is not None:
        low = high = layout_on(run, pool, standing)
    else:
        low, high = layout_range(run, pool, platform)
    require_memory(run, pools, low.nodes * low.per_node)
    network = choose_network(run, pool)
    requirements = network_requirements(network, high.nodes)
    if standing is not None:
        require_no_devices(requirements, standing)
    # The pods of a standing cluster were admitted before.
    queue_system = platform.queue.system if standing is None else "none"
    limits = run.limits
    max_start_s = limits.max_start_s or platform.job.pre_running_deadline_seconds
    return Plan(
        run=run.name,
        namespace=namespace,
        image=run.image or platform.image,
        pools=tuple(each.name for each in pools),
        topology_mode=run.resources.topology_mode,
        gpu_resource=pool.gpu_resource,
        nodes=high.nodes,
        min_nodes=low.nodes,
        spares=run.faults.spares,
        workers_per_node=high.per_node,
        cpus_per_worker=high.cpus_per_worker,
        node=high.node,
        head=head_size(platform.head, high.nodes * high.per_node),
        data=data,
        retries=run.faults.retries,
        queue_system=queue_system,
        queue_labels=queue_labels(
            run.queue, queue_system, platform.queue.name, run.name, namespace
        ),
        queue_annotations=queue_annotations(queue_system, is_elastic=run.resources.is_elastic),
        volumes=tuple(platform.data_volume(name) for name in run.volumes),
        network=network,
        network_requirements=requirements,
        labels=run.labels,
        annotations=run.annotations,
        pre_running_deadline_seconds=max_start_s,
        # On a standing cluster KubeRay would end the RayJob, and leave its driver running.
        active_deadline_seconds=(
            limits.max_run_s and limits.max_run_s + max_start_s if standing is None else None
        ),
        # Kueue gives the quota of a run to the next one as soon as it has ended.
        ttl_seconds_after_finished=(
            0 if queue_system == "kueue" else platform.job.ttl_seconds_after_finished
        ),
        keep_head_seconds_after_failure=platform.job.keep_head_seconds_after_failure,
        code=code,
        standing_cluster=None if standing is None else standing.name,
        returning_places=(
            places_of(standing, pool) if standing is not None and standing.idle_minutes else None
        ),
        launch=launch_of(run, run.image or platform.image, pools, data),
        trainer=trainer_config(
            with_receiver(
                with_data_nodes(run) if isinstance(run, NetworkRun) and data is not None else run,
                platform,
            ),
            _scaling(
                low, high, is_elastic=run.resources.is_elastic, uses_gpus=pool.gpus_per_node > 0
            ),
            platform.storage,
            code,
        ),
    )


def _require_what_the_platform_has(run: RunConfig, pool: Pool, platform: Platform) -> None:
    """Raise ConfigError if the run asks for what the platform forbids or does not have."""
    require_separate_attempts(run, platform)
    require_no_spares_if_elastic(run)
    require_permissions(run, platform)
    if isinstance(run, RecipeRun | OwnRecipeRun | BoostingRun):
        require_shared_source(run)
    if isinstance(run, NetworkRun):
        require_shared_weights(run)
        require_data_nodes(run, pool, platform)


def _scaling(low: Layout, high: Layout, *, is_elastic: bool, uses_gpus: bool) -> Scaling:
    """Return the numbers of workers that Ray Train starts, from the smallest and the largest layout."""
    return Scaling(
        num_workers=high.nodes * high.per_node,
        min_workers=low.nodes * low.per_node if is_elastic else None,
        workers_per_node=high.per_node if is_elastic else 1,
        use_gpu=uses_gpus,
        cpus_per_worker=high.cpus_per_worker,
        # On a GPU node the GPUs limit the number of workers. On a CPU node the CPUs reserved for data would
        # allow one worker more, for which there is no memory.
        has_worker_places=not uses_gpus,
    )
