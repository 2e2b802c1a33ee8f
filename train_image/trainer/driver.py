"""Workers on Ray: a Ray that is large enough, Ray Train around each worker, and Ray's notices and gauges."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

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
import ray.train  # noqa: E402
import ray.train.torch  # noqa: E402
import ray.util.metrics  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from trainer import attempt, failures, gauges  # noqa: E402
from trainer.attempt import Stopped, fail_on_sigterm  # noqa: E402
from trainer.config import DATA_CPUS, WORKER_RESOURCE, Scaling, TrainerConfig  # noqa: E402
from trainer.data.batch import Batches  # noqa: E402
from trainer.data.ray_loader import RayBatches  # noqa: E402
from trainer.errors import RunError  # noqa: E402
from trainer.folder import RunFolder  # noqa: E402
from trainer.lease import Lease  # noqa: E402
from trainer.output import Output  # noqa: E402
from trainer.progress import Length  # noqa: E402
from trainer.resume import Start  # noqa: E402
from trainer.strategy import Worker  # noqa: E402
from trainer.worker import Outcome, Task, torch_batches, work  # noqa: E402

T = TypeVar("T")

NODE_WAIT_S = 60.0
"""How long nodes of a cluster may take to register with Ray."""

GPU_CHECK_S = 300.0

SIGNAL_POLL_S = 0.5

STOP_WAIT_S = 20.0
"""How long workers may take to save and leave after SIGTERM; a pod has 30 s by default."""

SAVED = "stopped: all is saved up to step "
"""The last word of workers that were asked to stop."""


def run(config: TrainerConfig, output: Output) -> None:
    """Bring the run to its end on Ray. Raises TrainerError."""
    attempt.run(config, output, fit)


def fit(task: Task, folder: RunFolder, lease: Lease) -> Outcome:
    """Train on Ray, with as many workers as the config says."""
    with ray_running(task.config.scaling) as scratch:
        task.startup.reach("ray")
        return aside(
            lambda: run_workers(task, folder, scratch),
            ask_to_end=lambda: ask_to_stop(task, folder),
            tell=lambda outcome: print(f"{SAVED}{outcome.trained.step}", flush=True),
            check=lambda: lease.check() if lease.is_fenced else None,
        )


def ask_to_stop(task: Task, folder: RunFolder) -> None:
    """Have the workers save and leave; they look for this file about every second."""
    print("SIGTERM: the workers save a checkpoint and leave", flush=True)
    folder.write(folder.stop(task.attempt), "")


def aside(
    work: Callable[[], T],
    *,
    ask_to_end: Callable[[], None],
    tell: Callable[[T], None],
    check: Callable[[], None],
) -> T:
    """Do the work in another thread, while this one waits where a signal may end it.

    An exception that a signal handler raises in the middle of Ray's own code tears that apart. The
    first SIGTERM asks the work to end, waits STOP_WAIT_S for that, and tells what came of it. What
    `check` raises ends the waiting at once.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            outcome.set_exception(error)

    threading.Thread(target=run, name="fit", daemon=True).start()
    # The system may give a signal to any thread, and Python's handlers run in this one alone, once it wakes.
    try:
        while not wait([outcome], timeout=SIGNAL_POLL_S).done:
            check()
    except Stopped:
        ask_to_end()
        if wait([outcome], timeout=STOP_WAIT_S).done and outcome.exception() is None:
            tell(outcome.result())
        raise
    return outcome.result()


def run_workers(task: Task, folder: RunFolder, scratch: Path) -> Outcome:
    """Run the workers to their end, on a Ray that is large enough; again where they had to leave a node."""
    scaling = task.config.scaling
    wait_for_capacity(scaling, NODE_WAIT_S if "RAY_ADDRESS" in os.environ else 0.0)
    if scaling.use_gpu:
        check_gpus()
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    if scaling.min_workers is not None:
        # So long an elastic group waits for a lost node before it goes on without it.
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
    # Without these a worker that hangs blocks the others for ever, or is nobody's concern if it is alone.
    timeout_s = str(task.config.faults.collective_timeout_s)
    os.environ["RAY_TRAIN_COLLECTIVE_TIMEOUT_S"] = timeout_s
    os.environ["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"] = timeout_s
    for number in itertools.count(1):
        outcome = fit_workers(task, scratch / f"train-{number}")
        if not outcome.is_stopped or folder.exists(folder.stop(task.attempt)):
            break
        print(
            f"a node goes away: its workers have left, all is saved up to step {outcome.trained.step}",
            flush=True,
        )
        failures.note_leaving(folder, task.attempt)
    return outcome


def fit_workers(task: Task, storage: Path) -> Outcome:
    """Run one worker group after another, until the run has ended or a group has left."""
    config, scaling = task.config, task.config.scaling
    trainer = ray.train.torch.TorchTrainer(
        train_worker,
        train_loop_config={"task": task},
        scaling_config=ray.train.ScalingConfig(
            num_workers=(scaling.min_workers, scaling.num_workers)
            if scaling.min_workers is not None
            else scaling.num_workers,
            use_gpu=scaling.use_gpu,
            resources_per_worker=worker_resources(scaling),
        ),
        torch_config=ray.train.torch.TorchConfig(timeout_s=config.faults.collective_timeout_s),
        run_config=ray.train.RunConfig(
            name=f"{config.name}-a{task.attempt}",
            # Ray Train's own state must not outlive the attempt: ours lies in the run's folder.
            storage_path=str(storage),
            callbacks=[Failures(task)],
            failure_config=ray.train.FailureConfig(max_failures=config.faults.worker_failures),
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),
        ),
    )
    try:
        result = trainer.fit()
    except ray.train.WorkerGroupError as error:
        rank, failure = min(error.worker_failures.items())
        cause = getattr(failure, "_base_exc", failure)
        raise RunError(
            f"worker {rank} failed, after {config.faults.worker_failures} restarts: "
            f"{type(cause).__name__}: {cause}"
        ) from error
    return Outcome.from_plain(result.return_value)


class Failures(ray.train.UserCallback):
    """Puts down and prints when workers have failed. Ray Train's controller has one."""

    def __init__(self, task: Task) -> None:
        self.config = task.config
        self.attempt = task.attempt

    def after_exception(
        self, run_context: Any, worker_exceptions: Mapping[int, BaseException]
    ) -> None:
        storage = self.config.storage
        try:
            folder = RunFolder.open(storage.path, self.config.name, storage.endpoint)
            lines = failures.record(folder, self.attempt, worker_exceptions)
        except OSError as error:
            # What is raised here would end the run.
            lines = [f"a failure of workers could not be put down: {error}"]
        print("\n".join(lines), flush=True)


def train_worker(told: dict[str, Task]) -> dict[str, Any]:
    """What each Ray Train worker runs: its work, with its place in the group and Ray's own tools."""
    task = told["task"]
    context = ray.train.get_context()
    worker = Worker(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        device=ray.train.torch.get_device(),
    )
    outcome = work(
        task,
        worker,
        make_batches=ray_batches if task.config.data.loader == "ray" else torch_batches,
        drain_s=seconds_until_drain,
        gauges=Gauges(task) if worker.rank == 0 else lambda record: None,
        ray_worker=ray.get_runtime_context().get_worker_id(),
    )
    return outcome.to_plain()


def ray_batches(task: Task, length: Length, start: Start, worker: Worker) -> Batches:
    saved = start.state["begun"].get("batches", {}) if start.state else {}
    return RayBatches(task.data, length, start.trained, saved, worker, task.config)


def seconds_until_drain() -> float | None:
    """How long the nodes of all workers stay, if Ray has told that one goes; all workers ask together."""
    info = ray.train.get_preemption_info()
    if info is None:
        return None
    return max(info.deadline_ms / 1000 - time.time(), 0.0) if info.deadline_ms else 0.0


class Gauges:
    """Tells Ray's metrics endpoint of a record; Prometheus finds it there. Rank 0 has one."""

    def __init__(self, task: Task) -> None:
        labels = {"run": task.config.name, "attempt": str(task.attempt)}
        self.gauges = {}
        for gauge in gauges.GAUGES:
            self.gauges[gauge.name] = ray.util.metrics.Gauge(
                gauge.name, gauge.help, tag_keys=gauges.LABELS
            )
            self.gauges[gauge.name].set_default_tags(labels)

    def __call__(self, record: dict[str, Any]) -> None:
        for name, value in gauges.readings(record).items():
            self.gauges[name].set(value)


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
    here = str(Path(__file__).parent.parent)
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    ray.init(
        address="local",
        num_cpus=scaling.fewest * scaling.cpus_per_worker + DATA_CPUS,
        include_dashboard=False,
        logging_level=logging.WARNING,
        _temp_dir=str(scratch / "ray"),
    )


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
    """Resources of each node."""
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
