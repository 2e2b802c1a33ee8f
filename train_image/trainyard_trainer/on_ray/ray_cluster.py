"""Connect to the cluster's Ray, or start a local one with enough CPUs and GPUs."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from trainyard_trainer.on_ray.local_ray import ray_environment

ray_environment.set_defaults()  # first: Ray reads some of them when it is imported

import ray  # noqa: E402
import ray._private.utils  # noqa: E402
from ray.util.placement_group import placement_group, remove_placement_group  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from trainyard_trainer.config.scaling import DATA_CPUS, WORKER_RESOURCE, Scaling  # noqa: E402
from trainyard_trainer.environment import ray_job_of  # noqa: E402
from trainyard_trainer.errors import ConfigError, RunError  # noqa: E402
from trainyard_trainer.hardware import GpuFacts  # noqa: E402
from trainyard_trainer.on_ray.local_ray import forked_workers  # noqa: E402
from trainyard_trainer.on_ray.local_ray.mode import LocalRayMode, local_ray_mode  # noqa: E402
from trainyard_trainer.on_ray.local_ray.small_node import small_node  # noqa: E402
from trainyard_trainer.on_ray.place_queue import Ticket, places_taken  # noqa: E402
from trainyard_trainer.on_ray.ray_errors import in_one_line  # noqa: E402
from trainyard_trainer.run_files.standing_cluster import (  # noqa: E402
    PLACES_VARIABLE,
    run_of_job,
)
from trainyard_trainer.run_folder import stop_signals  # noqa: E402
from trainyard_trainer.run_folder.run_record import NodeFacts  # noqa: E402
from trainyard_trainer.run_folder.submission_names import is_on_standing_cluster  # noqa: E402

NODE_WAIT_S = 60.0
"""The time in seconds within which the nodes of a cluster must register with Ray."""

RETURN_S = 1800.0
"""The time in seconds within which nodes that an idle cluster has given back must be there again."""

HEAD_WAIT_S = 60.0
"""The time in seconds within which the head of RAY_ADDRESS must accept a connection."""

HOST_AND_PORT = re.compile(r"(?P<host>[^\s/:]+|\[[0-9A-Fa-f:.]+\]):(?P<port>\d{1,5})")
"""The address of a head. `auto` is the other value of RAY_ADDRESS that is used as it is."""

HEAD_REMEDY = (
    "Check that the head of the Ray cluster is running, and that RAY_ADDRESS is the HOST:PORT of its GCS "
    "(port 6379)."
)

PORT_LIMIT = 65535

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


_prepared: AbstractContextManager[Path] | None = None
"""A local Ray that was started before this process knew its run."""


def use_prepared(prepared: AbstractContextManager[Path]) -> None:
    """Let `ray_running` use a Ray that was started already; it can be used once."""
    global _prepared
    _prepared = prepared


@contextmanager
def ray_running(scaling: Scaling, folder: Path = NO_MODULES) -> Iterator[Path]:
    """Connect to the cluster of RAY_ADDRESS, or start a local Ray with enough CPUs for the workers.

    Yields a temporary folder on this machine, which is deleted at the end. Ray's processes start in
    `folder` and can import modules from it. A prepared Ray of this process is used. Raises RunError.
    """
    stop_signals.fail_on_sigterm()
    with (
        _prepared or ray_started(scaling.cpus, folder, use_gpu=scaling.use_gpu) as scratch,
        _places_on_standing_cluster(scaling),
    ):
        yield scratch


@contextmanager
def _places_on_standing_cluster(scaling: Scaling) -> Iterator[None]:
    """Keep the places of the workers inside the block, if other runs use the cluster as well.

    Waits until they are free. Raises RunError if the cluster is too small.
    """
    job = ray_job_of() if is_on_standing_cluster() else None
    if job is None:
        yield
        return
    ticket = Ticket(run=run_of_job(job), workers=scaling.num_workers)
    if places := os.environ.get(PLACES_VARIABLE):
        with places_taken(ticket, lambda: int(places)):
            bring_nodes_back(scaling)
            yield
    else:
        # A cluster that is too small even for this run alone is refused with its numbers.
        wait_for_capacity(scaling, NODE_WAIT_S)
        with places_taken(ticket, lambda: count_places(live_nodes(), scaling)):
            yield


def bring_nodes_back(scaling: Scaling) -> None:
    """Have the autoscaler start nodes for the workers, and wait for them. Raises RunError."""
    print("the run has its places; nodes that were given back are started again", flush=True)
    bundles = [*[worker_resources(scaling)] * scaling.num_workers, {"CPU": DATA_CPUS}]
    # A demand that the autoscaler sees; Ray Train makes a placement group of its own.
    demand = placement_group(bundles)
    try:
        if not demand.wait(RETURN_S):
            raise RunError(
                f"the nodes that the standing cluster has given back did not return within {RETURN_S:g} s: "
                f"{missing_capacity(live_nodes(), scaling) or 'other programs use them'}"
            )
    finally:
        remove_placement_group(demand)


@contextmanager
def ray_started(num_cpus: int, folder: Path, *, use_gpu: bool) -> Iterator[Path]:
    """Do as `ray_running`, for a Ray on this machine with so many CPUs."""
    # Ray creates sockets in it, whose paths may have at most 107 characters: some TMPDIRs are too long.
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 24 else "/tmp"
    scratch = Path(tempfile.mkdtemp(prefix="trainyard-", dir=base))
    existing = ray_environment.existing_cluster()
    with forked_workers.forking() as worker_program:
        try:
            # Ray adds the current folder to the import path of its workers.
            with _current_folder(folder), _handler_kept(), stop_signals.deferred():
                if existing:
                    join_ray(existing)
                else:
                    mode = local_ray_mode(use_gpu=use_gpu)
                    start_local_ray(num_cpus, mode, scratch, worker_program)
                    forked_workers.announce()
            yield scratch
        finally:
            ray.shutdown()
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _handler_kept() -> Iterator[None]:
    """Keep this program's own handler of SIGTERM, if it has one; that of Ray exits while Ray starts."""
    utils: Any = ray._private.utils
    set_handler = utils.set_sigterm_handler
    if stop_signals.is_sigterm_handled():
        utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler


def join_ray(address: str) -> None:
    """Connect to the Ray cluster at an address. Raises RunError, and ConfigError for a wrong address."""
    require_head(address)
    try:
        ray.init(address, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        raise RunError(
            f"cannot connect to the Ray cluster of RAY_ADDRESS = {address}: {in_one_line(error)}\n"
            f"       {HEAD_REMEDY}"
        ) from error


def require_head(address: str) -> None:
    """Raise RunError if no program accepts connections at an address within HEAD_WAIT_S seconds.

    Raises ConfigError if it is not the address of a head. Ray itself would try to connect for many minutes.
    """
    if address == "auto":
        return
    found = HOST_AND_PORT.fullmatch(address)
    if found is None or int(found["port"]) > PORT_LIMIT:
        raise ConfigError(
            f"RAY_ADDRESS = {address} is not HOST:PORT.\n"
            "       Set it to the address of the head's GCS (port 6379), not of its dashboard or of a Ray "
            "Client server. Unset it to start a Ray on this machine."
        )
    place = (found["host"].strip("[]"), int(found["port"]))
    deadline = time.monotonic() + HEAD_WAIT_S
    while (problem := _connection_problem(place, deadline - time.monotonic())) is not None:
        if time.monotonic() >= deadline:
            raise RunError(
                f"no Ray cluster answers at RAY_ADDRESS = {address}, for {HEAD_WAIT_S:g} s: "
                f"{in_one_line(problem)}\n       {HEAD_REMEDY}"
            ) from problem
        time.sleep(min(1, max(0, deadline - time.monotonic())))


def _connection_problem(place: tuple[str, int], timeout_s: float) -> OSError | None:
    """Try to connect to a host and port once; return the error, or None if a program accepts connections."""
    try:
        socket.create_connection(place, timeout=max(timeout_s, 0.1)).close()
    except OSError as error:
        return error
    return None


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
    return ray_environment.existing_cluster() or str(ray.get_runtime_context().gcs_address)


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
            environment_of_ray(),
            nullcontext() if mode == "full" else small_node(worker_program),
        ):
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                logging_level=logging.WARNING,
                _temp_dir=str(scratch / "ray"),
            )
    except (
        Exception
    ) as error:  # of this class: Ray has none of its own for a process that does not start
        raise RunError(
            f"a local Ray could not be started in {scratch}: {in_one_line(error)}\n"
            f"       Ray needs free space in {scratch.parent} and /dev/shm, free memory, 100 open files "
            "(ulimit -n), and a path of at most about 45 characters. Set TMPDIR to a short path on a disk "
            "with free space."
        ) from error


@contextmanager
def environment_of_ray() -> Iterator[None]:
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
    wait_for_capacity(scaling, NODE_WAIT_S if ray_environment.existing_cluster() else 0.0)
    nodes = live_nodes()
    print(
        f"cluster: {len(nodes)} node{'s' if len(nodes) > 1 else ''}, "
        f"{sum(node.get('CPU', 0) for node in nodes):g} CPUs, "
        f"{sum(node.get('GPU', 0) for node in nodes):g} GPUs",
        flush=True,
    )
    if scaling.use_gpu:
        check_gpus()


def wait_for_capacity(scaling: Scaling, timeout_s: float) -> None:
    """Wait until the workers fit in the cluster. Raise RunError with the numbers if they do not in time."""
    deadline = time.monotonic() + timeout_s
    while problem := missing_capacity(live_nodes(), scaling):
        if time.monotonic() >= deadline:
            raise RunError(problem)
        time.sleep(1)


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


def count_places(nodes: list[Mapping[str, float]], scaling: Scaling) -> int:
    """Return for how many workers the nodes have resources, if nothing else uses them."""
    each = worker_resources(scaling)
    return sum(
        int(min(node.get(name, 0) // amount for name, amount in each.items())) for node in nodes
    )


def missing_capacity(nodes: list[Mapping[str, float]], scaling: Scaling) -> str:
    """Return why the workers and one CPU for data do not fit, or an empty string if they fit."""
    each = worker_resources(scaling)
    places = count_places(nodes, scaling)
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
        raise RunError(
            f"PyTorch could not be tried on all {len(nodes)} nodes with GPUs within {GPU_CHECK_S:g} s: "
            f"{in_one_line(error)}\n       Check these nodes with `ray status` on the head. A node that was "
            "lost is replaced in the next attempt."
        ) from error
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
