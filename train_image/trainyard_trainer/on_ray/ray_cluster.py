"""A Ray that is large enough for a run: the cluster's, or one of this machine's own."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# Ray reads most of these when it is imported; what is set outside wins.
RAY_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_COLOR_PREFIX": "0",
    # Lines that say nothing about the run, some of them each second or each epoch.
    "RAY_DEDUP_LOGS_SKIP_REGEX": "|".join(
        (
            "Failed to query Ray Train Controller actor state",
            "'PreemptionWatcher' .* has constructor arguments in the object store",
            r"(Starting execution|Execution plan) of Dataset",
            r"Dataset \S+ execution finished",
            "Progress bars disabled",
            r"ExecutionOptions.exclude_resources|self\.exclude_resources",
        )
    ),
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    # The next epoch's data tasks find their processes still there: a new one imports for seconds. Ray's
    # own is 1 s. It counts where Ray is started, which on a cluster are the pods.
    "RAY_idle_worker_killing_time_threshold_ms": "600000",
    # A data set may rest for longer than half an hour, in a long validation.
    "RAY_DATA_EXECUTION_NO_PROGRESS_TIMEOUT_S": "-1",
    # How soon the end of training and a lost worker are noticed; the default is 2.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # How soon workers hear that a node goes away; the default is 5, which is all the time that some have.
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # How long a worker group that has failed is waited for to leave in good order, which a worker that
    # hangs does not; the default is 30.
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",
}
for _name, _value in RAY_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import ray  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from trainyard_trainer.config.scaling import DATA_CPUS, WORKER_RESOURCE, Scaling  # noqa: E402
from trainyard_trainer.errors import RunError  # noqa: E402
from trainyard_trainer.run_folder.attempt_scope import fail_on_sigterm  # noqa: E402

NODE_WAIT_S = 60.0
"""How long nodes of a cluster may take to register with Ray."""

GPU_CHECK_S = 300.0


def worker_resources(scaling: Scaling) -> dict[str, float]:
    """Always with CPUs: a GPU worker would otherwise get none, and one thread."""
    resources: dict[str, float] = {"CPU": scaling.cpus_per_worker}
    if scaling.use_gpu:
        resources["GPU"] = 1
    if scaling.has_worker_places:
        resources[WORKER_RESOURCE] = 1
    return resources


@contextmanager
def ray_running(scaling: Scaling) -> Iterator[Path]:
    """Ray with room for the workers: the cluster of RAY_ADDRESS, else one of its own.

    Gives a folder of this machine that is gone afterwards. Raises RunError.
    """
    # Sockets lie below it, and their paths may have 107 characters: some TMPDIRs are too long.
    base = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 24 else "/tmp"
    scratch = Path(tempfile.mkdtemp(prefix="trainyard-", dir=base))
    is_local = "RAY_ADDRESS" not in os.environ
    try:
        if is_local:
            start_local_ray(scaling, scratch)
        else:
            ray.init(logging_level=logging.WARNING)
        fail_on_sigterm()  # Ray has set its own handler.
        yield scratch
    finally:
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)


def address() -> str:
    """Where other programs find the Ray in use."""
    return os.environ.get("RAY_ADDRESS") or str(ray.get_runtime_context().gcs_address)


def start_local_ray(scaling: Scaling, scratch: Path) -> None:
    """A private Ray on this machine, with as many logical CPUs as the run needs."""
    # Ray would start to ask for a token otherwise, and leave one in the home folder.
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # There is no dashboard to ask. Ray would look for one through all processes of the machine, each
    # second, and fall over a second Ray that runs there; at port 9 nobody answers.
    os.environ.setdefault("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
    # Nobody takes this machine away with a notice.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    # Workers inherit it, and find this package where the driver has found it.
    here = str(Path(__file__).parents[2])
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    ray.init(
        address="local",
        num_cpus=scaling.fewest * scaling.cpus_per_worker + DATA_CPUS,
        include_dashboard=False,
        logging_level=logging.WARNING,
        _temp_dir=str(scratch / "ray"),
    )


def require_room(scaling: Scaling) -> None:
    """Raises RunError where the workers find no place in the Ray in use, or torch no GPU."""
    wait_for_capacity(scaling, NODE_WAIT_S if "RAY_ADDRESS" in os.environ else 0.0)
    if scaling.use_gpu:
        check_gpus()


def wait_for_capacity(scaling: Scaling, timeout_s: float) -> None:
    """Raises RunError with the numbers if the workers do not fit in the cluster in time."""
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


def missing_capacity(nodes: list[Mapping[str, float]], scaling: Scaling) -> str:
    """What keeps the workers, and a CPU for data beside them, from fitting; empty if they do fit."""
    each = worker_resources(scaling)
    places = sum(
        int(min(node.get(name, 0) // amount for name, amount in each.items())) for node in nodes
    )
    cpus = sum(node.get("CPU", 0) for node in nodes)
    wanted_cpus = scaling.fewest * scaling.cpus_per_worker + DATA_CPUS
    if places >= scaling.fewest and cpus >= wanted_cpus:
        return ""
    gpus = sum(node.get("GPU", 0) for node in nodes)
    need = " and ".join(f"{amount:g} {name}" for name, amount in each.items())
    return (
        f"the Ray cluster is too small: {scaling.fewest} workers with {need} each, and "
        f"{DATA_CPUS} CPU for data, need {wanted_cpus} CPUs"
        + (f" and {scaling.fewest} GPUs" if scaling.use_gpu else "")
        + f"; its {len(nodes)} nodes have {cpus:g} CPUs and {gpus:g} GPUs, with places for "
        f"{places} workers.\n       Ask for fewer workers, or for a larger pool."
    )


def check_gpus() -> None:
    """Raises RunError if torch cannot use a GPU that Ray counts on some node."""
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
            f"CUDA is missing: Ray counts GPUs on {len(nodes)} nodes, but torch cannot use them on "
            f"{len(broken)}.\n"
            + "".join(f"       {line}\n" for line in broken)
            + "       Install the NVIDIA driver and device plugin there, or train with "
            "resources.workers in place of resources.gpus."
        )


@ray.remote(num_gpus=1, num_cpus=0, max_retries=0)
def _find_cuda() -> str:
    """What is wrong with CUDA on this node; empty if nothing is."""
    import torch

    if torch.cuda.is_available():
        return ""
    return (
        f"torch.cuda.is_available() is False (torch {torch.__version__}, built for CUDA "
        f"{torch.version.cuda}, CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')})"
    )
