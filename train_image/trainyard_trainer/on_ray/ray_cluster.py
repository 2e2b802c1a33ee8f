"""Connect to the cluster's Ray, or start a local one with enough CPUs and GPUs."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from trainyard_trainer.on_ray.local_ray import ray_environment

ray_environment.set_defaults()  # first: Ray reads some of them when it is imported

import ray  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from trainyard_trainer.config.scaling import DATA_CPUS, WORKER_RESOURCE, Scaling  # noqa: E402
from trainyard_trainer.errors import RunError  # noqa: E402
from trainyard_trainer.hardware import GpuFacts  # noqa: E402
from trainyard_trainer.on_ray.local_ray import forked_workers  # noqa: E402
from trainyard_trainer.on_ray.local_ray.mode import LocalRayMode, local_ray_mode  # noqa: E402
from trainyard_trainer.on_ray.local_ray.small_node import small_node  # noqa: E402
from trainyard_trainer.run_folder.attempt_scope import fail_on_sigterm  # noqa: E402
from trainyard_trainer.run_folder.run_record import NodeFacts  # noqa: E402

NODE_WAIT_S = 60.0
"""The time in seconds within which the nodes of a cluster must register with Ray."""

GPU_CHECK_S = 300.0
"""The time limit in seconds for the check of the GPUs."""

NO_MODULES = Path("/")
"""A folder without Python modules of the user."""


def worker_resources(scaling: Scaling) -> dict[str, float]:
    """Return the resources of one worker. They include CPUs: Ray Train gives GPU workers none by default."""
    resources: dict[str, float] = {"CPU": scaling.cpus_per_worker}
    if scaling.use_gpu:
        resources["GPU"] = 1
    if scaling.has_worker_places:
        resources[WORKER_RESOURCE] = 1
    return resources


@contextmanager
def ray_running(scaling: Scaling, folder: Path = NO_MODULES) -> Iterator[Path]:
    """Connect to the cluster of RAY_ADDRESS, or start a local Ray with enough CPUs for the workers.

    Yields a temporary folder on this machine, which is deleted at the end. Ray's processes start in
    `folder` and can import modules from it. A prepared Ray of this process is used. Raises RunError.
    """
    with _take_prepared() or _ray_started(scaling.cpus, scaling.use_gpu, folder) as scratch:
        fail_on_sigterm()  # Ray has replaced the handler.
        yield scratch


@contextmanager
def _ray_started(num_cpus: int, use_gpu: bool, folder: Path) -> Iterator[Path]:
    # Ray creates sockets in it, whose paths may have at most 107 characters: some TMPDIRs are too long.
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 24 else "/tmp"
    scratch = Path(tempfile.mkdtemp(prefix="trainyard-", dir=base))
    is_local = "RAY_ADDRESS" not in os.environ
    with forked_workers.forking() as worker_program:
        try:
            # Ray adds the current folder to the import path of its workers.
            with _current_folder(folder):
                if is_local:
                    start_local_ray(
                        num_cpus, local_ray_mode(use_gpu=use_gpu), scratch, worker_program
                    )
                    forked_workers.announce()
                else:
                    join_ray(os.environ["RAY_ADDRESS"])
            yield scratch
        finally:
            ray.shutdown()
            shutil.rmtree(scratch, ignore_errors=True)


class PreparedRay:
    """A local Ray that was started before this process knows its run, and its environment."""

    def __init__(self, num_cpus: int) -> None:
        self._started = ExitStack()
        self._scratch = self._started.enter_context(_ray_started(num_cpus, False, NO_MODULES))
        with _environment_of_ray():
            self._before = dict(os.environ)

    @contextmanager
    def used(self) -> Iterator[Path]:
        """Give the environment of this process to the workers; end Ray after the block."""
        with self._started:
            with _environment_of_ray():
                forked_workers.tell_environment(self._before)
            for handler in logging.getLogger("ray").handlers:
                if isinstance(handler, logging.StreamHandler):
                    handler.setStream(sys.stderr)  # which `Output` has replaced meanwhile
            yield self._scratch

    def end(self) -> None:
        """End this Ray."""
        self._started.close()


_prepared: PreparedRay | None = None


def prepare(num_cpus: int) -> PreparedRay:
    """Start a local Ray for the next `ray_running` of this process. Raises RunError."""
    global _prepared
    _prepared = PreparedRay(num_cpus)
    return _prepared


def _take_prepared() -> AbstractContextManager[Path] | None:
    """Return the prepared Ray of this process, once."""
    global _prepared
    taken, _prepared = _prepared, None
    return taken.used() if taken else None


def join_ray(address: str) -> None:
    """Connect to the Ray cluster of RAY_ADDRESS. Raises RunError."""
    try:
        ray.init(logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise RunError(
            f"cannot connect to the Ray cluster of RAY_ADDRESS = {address}: {_first_line(error)}\n"
            "       RAY_ADDRESS must be the HOST:PORT of the head's GCS (port 6379), not of its dashboard. "
            "Check that the head is running."
        ) from error


def _first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def _current_folder(folder: Path) -> Iterator[None]:
    """Change the current folder inside the block."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def address() -> str:
    """Return the address with which other programs can connect to the Ray in use."""
    return os.environ.get("RAY_ADDRESS") or str(ray.get_runtime_context().gcs_address)


def start_local_ray(
    num_cpus: int, mode: LocalRayMode, scratch: Path, worker_program: str | None
) -> None:
    """Start a Ray on this machine with so many logical CPUs.

    `worker_program` is the program that the raylet starts in place of a worker; see `local_ray`. Raises
    RunError.
    """
    ray_environment.set_local_defaults(mode)
    try:
        with (
            _environment_of_ray(),
            nullcontext() if mode == "full" else small_node(worker_program),
        ):
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                logging_level=logging.WARNING,
                _temp_dir=str(scratch / "ray"),
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise RunError(
            f"a local Ray could not be started in {scratch}: {_first_line(error)}\n"
            f"       {scratch.parent} and /dev/shm must have free space, and the path must have at most "
            "about 45 characters. Set TMPDIR to a short path on a disk with free space."
        ) from error


@contextmanager
def _environment_of_ray() -> Iterator[None]:
    """Have in this block the PYTHONPATH that Ray's processes are to inherit."""
    paths = forked_workers.import_path()
    before = os.environ.pop("PYTHONPATH", None)
    if paths:
        os.environ["PYTHONPATH"] = paths
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH", None)
        if before is not None:
            os.environ["PYTHONPATH"] = before


def require_room(scaling: Scaling) -> None:
    """Raise RunError if the workers do not fit in the Ray in use, or if PyTorch cannot use its GPUs."""
    wait_for_capacity(scaling, NODE_WAIT_S if "RAY_ADDRESS" in os.environ else 0.0)
    if scaling.use_gpu:
        check_gpus()


def wait_for_capacity(scaling: Scaling, timeout_s: float) -> None:
    """Wait until the workers fit in the cluster. Raise RunError with the numbers if they do not in time."""
    deadline = time.monotonic() + timeout_s
    while problem := missing_capacity(live_nodes(), scaling):
        if time.monotonic() >= deadline:
            raise RunError(problem)
        time.sleep(1)
    nodes = live_nodes()
    print(
        f"cluster: {len(nodes)} node{'s' if len(nodes) > 1 else ''}, "
        f"{sum(node.get('CPU', 0) for node in nodes):g} CPUs, "
        f"{sum(node.get('GPU', 0) for node in nodes):g} GPUs",
        flush=True,
    )


def live_nodes() -> list[Mapping[str, float]]:
    """Return the resources of each node that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def node_facts() -> list[NodeFacts]:
    """Return the nodes that are alive, with the models of their GPUs as far as Ray knows them."""
    return [
        NodeFacts(
            name=node["NodeManagerHostname"],
            id=node["NodeID"],
            gpus=(GpuFacts(model=model, id=None),) * int(node["Resources"].get("GPU", 0)),
        )
        for node in ray.nodes()
        if node["Alive"]
        for model in (node["Labels"].get("ray.io/accelerator-type", "unknown"),)
    ]


def missing_capacity(nodes: list[Mapping[str, float]], scaling: Scaling) -> str:
    """Return why the workers and one CPU for data do not fit, or an empty string if they fit."""
    each = worker_resources(scaling)
    places = sum(
        int(min(node.get(name, 0) // amount for name, amount in each.items())) for node in nodes
    )
    cpus = sum(node.get("CPU", 0) for node in nodes)
    wanted_cpus = scaling.cpus
    if places >= scaling.fewest and cpus >= wanted_cpus:
        return ""
    gpus = sum(node.get("GPU", 0) for node in nodes)
    need = " and ".join(f"{amount:g} {name}" for name, amount in each.items())
    return (
        f"the Ray cluster is too small: {scaling.fewest} workers with {need} each, and "
        f"{DATA_CPUS} CPU for data, need {wanted_cpus} CPUs"
        + (f" and {scaling.fewest} GPUs" if scaling.use_gpu else "")
        + f"; its {len(nodes)} nodes have {cpus:g} CPUs and {gpus:g} GPUs, with room for "
        f"{places} workers.\n       Use fewer workers, or a larger pool."
    )


def check_gpus() -> None:
    """Raise RunError if PyTorch cannot use CUDA on a node that has GPUs according to Ray."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    answers = [
        _find_cuda.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in nodes
    ]
    try:
        problems = dict(
            zip(
                (node["NodeManagerHostname"] for node in nodes),
                ray.get(answers, timeout=GPU_CHECK_S),
                strict=True,
            )
        )
    except ray.exceptions.RayError as error:
        raise RunError(f"the check of the nodes' GPUs failed: {error}") from error
    broken = [f"node {name}: {problem}" for name, problem in problems.items() if problem]
    if broken:
        raise RunError(
            f"CUDA is missing: Ray found GPUs on {len(nodes)} nodes, but PyTorch cannot use them on "
            f"{len(broken)}.\n"
            + "".join(f"       {line}\n" for line in broken)
            + "       Install the NVIDIA driver and device plugin there, or train with "
            "resources.workers instead of resources.gpus."
        )


@ray.remote(num_gpus=1, num_cpus=0, max_retries=0)
def _find_cuda() -> str:
    """Return why CUDA cannot be used on this node, or an empty string if it can."""
    import torch

    if torch.cuda.is_available():
        return ""
    return (
        f"torch.cuda.is_available() is False (torch {torch.__version__}, built for CUDA "
        f"{torch.version.cuda}, CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')})"
    )
