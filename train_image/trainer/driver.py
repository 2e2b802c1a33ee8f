"""One attempt at a run, from its config to its summary. Here a run meets Ray."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
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
    # A data set may rest for longer than half an hour, in a long validation.
    "RAY_DATA_EXECUTION_NO_PROGRESS_TIMEOUT_S": "-1",
    # Without it a worker that hangs blocks the others for ever.
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "900",
    # How soon the end of training and a lost worker are noticed; the default is 2.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_USAGE_STATS_ENABLED": "0",
}
for _name, _value in RAY_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

import ray  # noqa: E402
import ray.train  # noqa: E402
import ray.train.torch  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from trainer import loop, model, report, resume  # noqa: E402
from trainer.checkpoint import MODEL, Checkpoint, Checkpoints  # noqa: E402
from trainer.config import DATA_CPUS, Scaling, TrainerConfig, batch_per_worker  # noqa: E402
from trainer.data import ray_loader, sources  # noqa: E402
from trainer.data.sources import Prepared  # noqa: E402
from trainer.data.torch_loader import (  # noqa: E402
    GlobalBatches,
    ParquetImages,
    TorchBatches,
    ValidationBatches,
)
from trainer.errors import ConfigError, RunError  # noqa: E402
from trainer.folder import RunFolder  # noqa: E402
from trainer.output import Output, ProgressPrinter  # noqa: E402
from trainer.progress import Length, Recorder, Trained, cleaned, read_lines  # noqa: E402
from trainer.strategy import Worker  # noqa: E402

T = TypeVar("T")

NODE_WAIT_S = 60.0
"""How long nodes of a cluster may take to register with Ray."""

GPU_CHECK_S = 300.0

SIGNAL_POLL_S = 0.5


def run(config: TrainerConfig, output: Output) -> None:
    """Bring the run to its end, from wherever it stands. Raises TrainerError."""
    config = with_absolute_path(config)
    folder = RunFolder.open(config.storage.path, config.name, config.storage.endpoint)

    # Check all that can be checked before the run's folder is touched.
    try:
        parameters = check(config, folder)
        data = sources.prepare(config.data, folder)
    except OSError as error:
        raise RunError(
            f"the storage {config.storage.path} cannot be used: {error}\n"
            "       It must be a folder or bucket that this machine may read and write."
        ) from error
    model.check_fit(config.train.model, data.images)
    length = Length.of(config, data.num_train)

    with attempt_at(config, folder, output) as attempt:
        start = begin_attempt(config, folder, attempt)
        trained = start.trained if start else Trained()
        describe(config, folder, data, length, parameters, attempt)
        print(f"start: checkpoint {start.name}" if start else "start: from scratch", flush=True)

        workers = config.scaling.num_workers
        Recorder(folder, length, attempt=attempt, workers=workers).show_start(trained)
        resumed_from = start.name if start else None
        with ProgressPrinter(folder, output, attempt):
            if trained.epoch < config.train.epochs:
                resumed_from = train(config, folder, data, attempt)
        summary = finish(config, folder, data, attempt, resumed_from)
    print(f"summary {json.dumps(summary)}", flush=True)


def with_absolute_path(config: TrainerConfig) -> TrainerConfig:
    """The same config for workers, which have another working directory."""
    storage = config.storage
    if "://" not in storage.path:
        storage = storage.model_copy(update={"path": str(Path(storage.path).resolve())})
    return config.model_copy(update={"storage": storage})


def check(config: TrainerConfig, folder: RunFolder) -> int:
    """Number of the model's parameters. Raises ConfigError for what no attempt could mend."""
    try:
        batch_per_worker(config.train.global_batch_size, config.scaling.num_workers)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    parameters = model.check_model(config.train.model)
    resume.check_identity(folder, config)
    return parameters


def describe(
    config: TrainerConfig,
    folder: RunFolder,
    data: Prepared,
    length: Length,
    parameters: int,
    attempt: int,
) -> None:
    """Print what is about to happen, in numbers."""
    images, workers = data.images, config.scaling.num_workers
    lines = (
        f"run {config.name}, attempt {attempt}: {folder.show(folder.root)}",
        "versions: " + ", ".join(f"{name} {version}" for name, version in versions().items()),
        f"data: {images.source}, {data.num_train:,} training and {data.num_valid:,} validation "
        f"images of {'x'.join(map(str, images.shape))}, {len(images.classes)} classes, "
        f"by the {config.data.loader} loader",
        f"model: {config.train.model.name}, {parameters:,} parameters",
        f"plan: {length.epochs} epochs of {length.steps_per_epoch} steps of "
        f"{length.global_batch_size} images, {length.global_batch_size // workers} on each of "
        f"{workers} workers",
    )
    print("\n".join(lines), flush=True)


# An attempt and its records.


@contextmanager
def attempt_at(config: TrainerConfig, folder: RunFolder, output: Output) -> Iterator[int]:
    """The attempt's number; if the attempt fails, summary.json says why."""
    attempt = 1 + max((line["attempt"] for line in read_lines(folder, folder.attempts)), default=0)
    output.keep_in(folder, folder.log(attempt))
    fail_on_sigterm()
    try:
        yield attempt
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            error = RunError("the run was interrupted; started again, it goes on from there")
        line = (str(error).splitlines() or [type(error).__name__])[0]
        newest = Checkpoints(folder).newest()
        trained = newest.trained if newest else Trained()
        summary = summarise(config, folder, trained, attempt, None, error=line)
        folder.write(folder.summary, json.dumps(summary, indent=2))
        raise error


def fail_on_sigterm() -> None:
    """Turn the first SIGTERM into an error of the main thread, which leaves in good order."""

    def stop(signum: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise RunError("the run was stopped by SIGTERM; started again, it goes on from there")

    signal.signal(signal.SIGTERM, stop)


def begin_attempt(config: TrainerConfig, folder: RunFolder, attempt: int) -> Checkpoint | None:
    """Put the attempt on record; returns the checkpoint from which it starts."""
    folder.sweep()
    # Until this attempt has ended, the run has no outcome.
    folder.delete(folder.summary)
    start = Checkpoints(folder).newest()
    record = {
        "attempt": attempt,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "resumed_from": start.name if start else None,
        "workers": config.scaling.num_workers,
        "versions": versions(),
    }
    folder.append(folder.attempts, json.dumps(record) + "\n")
    folder.write(folder.run, config.model_dump_json(indent=2))
    return start


def versions() -> dict[str, str]:
    packages = {name: metadata.version(name) for name in ("ray", "torch", "torchvision")}
    return {"python": platform.python_version(), **packages}


def finish(
    config: TrainerConfig,
    folder: RunFolder,
    data: Prepared,
    attempt: int,
    resumed_from: str | None,
) -> dict[str, Any]:
    """Make model, report and summary of the last checkpoint; returns the summary."""
    checkpoints = Checkpoints(folder)
    last = checkpoints.newest(print)
    if last is None or last.trained.epoch < config.train.epochs:
        raise RunError(
            f"training ended, but the last intact checkpoint in {folder.show(folder.checkpoints)} "
            f"is {f'{last.name} of epoch {last.trained.epoch}' if last else 'missing'}. "
            "Start the run again: it goes on from there."
        )
    folder.copy(checkpoints.path(last.name, MODEL), folder.model)
    summary = summarise(config, folder, last.trained, attempt, resumed_from, error=None)
    report.write_report(folder, config, data.images, summary)
    folder.write(folder.summary, json.dumps(summary, indent=2))
    return summary


def summarise(
    config: TrainerConfig,
    folder: RunFolder,
    trained: Trained,
    attempt: int,
    resumed_from: str | None,
    *,
    error: str | None,
) -> dict[str, Any]:
    """What summary.json holds."""
    summary = {
        "name": config.name,
        "outcome": "failed" if error else "succeeded",
        "val_accuracy": trained.val_accuracy,
        "epochs": trained.epoch,
        "samples_seen": trained.samples,
        "images_per_s": round(trained.images_per_s, 1),
        "attempts": attempt,
        "resumed_from": resumed_from,
        "train_s": round(trained.train_s, 1),
        "workers": config.scaling.num_workers,
        "model": folder.show(folder.model),
        "metrics": folder.show(folder.metrics),
        "report": folder.show(folder.report),
        "error": error,
    }
    return cleaned(summary)


# Ray.


def train(config: TrainerConfig, folder: RunFolder, data: Prepared, attempt: int) -> str | None:
    """Train on Ray; returns the checkpoint from which the last worker group started."""
    with ray_running(config.scaling) as scratch:
        return aside(lambda: fit(config, folder, data, attempt, scratch))


def aside(work: Callable[[], T]) -> T:
    """Do the work in another thread, while this one waits where a signal may end it.

    An exception that a signal handler raises in the middle of Ray's own code tears that apart.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            outcome.set_exception(error)

    threading.Thread(target=run, name="fit", daemon=True).start()
    # The system may give a signal to any thread, and Python's handlers run in this one alone, once it wakes.
    while not wait([outcome], timeout=SIGNAL_POLL_S).done:
        pass
    return outcome.result()


def fit(
    config: TrainerConfig, folder: RunFolder, data: Prepared, attempt: int, scratch: Path
) -> str | None:
    """Run the workers to their end, on a Ray that is large enough."""
    wait_for_capacity(config.scaling, NODE_WAIT_S if "RAY_ADDRESS" in os.environ else 0.0)
    if config.scaling.use_gpu:
        check_gpus()
    datasets = {}
    if config.data.loader == "ray":
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        datasets["train"] = ray_loader.read_training_data(config.data, folder, data)
    scaling = config.scaling
    trainer = ray.train.torch.TorchTrainer(
        train_worker,
        train_loop_config={
            "config": config.model_dump_json(),
            "data": data,
            "attempt": attempt,
        },
        scaling_config=ray.train.ScalingConfig(
            num_workers=scaling.num_workers,
            use_gpu=scaling.use_gpu,
            resources_per_worker=worker_resources(scaling),
        ),
        run_config=ray.train.RunConfig(
            name=f"{config.name}-a{attempt}",
            # Ray Train's own state must not outlive the attempt: ours lies in the run's folder.
            storage_path=str(scratch / "train"),
            failure_config=ray.train.FailureConfig(max_failures=config.faults.worker_failures),
            logging_config=ray.train.LoggingConfig(log_level="WARNING"),
        ),
        datasets=datasets,
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
    return result.return_value


def train_worker(task: dict[str, Any]) -> str | None:
    """What each Ray Train worker runs: the loop, with its place in the group and its batches."""
    config = TrainerConfig.model_validate_json(task["config"])
    data: Prepared = task["data"]
    context = ray.train.get_context()
    device = ray.train.torch.get_device()
    worker = Worker(
        rank=context.get_world_rank(), world_size=context.get_world_size(), device=device
    )
    folder = RunFolder.open(config.storage.path, config.name, config.storage.endpoint)
    length = Length.of(config, data.num_train)
    start = loop.train(
        config,
        worker=worker,
        folder=folder,
        images=data.images,
        length=length,
        batches=training_batches(config, folder, data, length, worker),
        validation=ValidationBatches(
            ParquetImages(folder, folder.valid_data, data.images),
            batch_size=batch_per_worker(config.train.global_batch_size, worker.world_size),
            rank=worker.rank,
            world_size=worker.world_size,
        ),
        report=Recorder(folder, length, attempt=task["attempt"], workers=worker.world_size),
        attempt=task["attempt"],
    )
    return start.name if start else None


def training_batches(
    config: TrainerConfig, folder: RunFolder, data: Prepared, length: Length, worker: Worker
) -> loop.Batches:
    """The batches of the loader that the config names."""
    is_cuda = worker.device.type == "cuda"
    size, seed = config.train.global_batch_size, config.train.seed
    if config.data.loader == "ray":
        return ray_loader.RayBatches(
            ray.train.get_dataset_shard("train"),
            steps_per_epoch=length.steps_per_epoch,
            batch_size=batch_per_worker(size, worker.world_size),
            shuffle=config.data.shuffle,
            seed=seed,
            pin_memory=is_cuda,
        )
    sampler = GlobalBatches(
        data.num_train,
        size,
        rank=worker.rank,
        world_size=worker.world_size,
        shuffle=config.data.shuffle,
        seed=seed,
    )
    dataset = ParquetImages(folder, folder.train_data, data.images)
    return TorchBatches(dataset, sampler, pin_memory=is_cuda)


def worker_resources(scaling: Scaling) -> dict[str, float]:
    """Always with CPUs: a GPU worker would otherwise get none, and one thread."""
    return {"CPU": scaling.cpus_per_worker} | ({"GPU": 1} if scaling.use_gpu else {})


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
        num_cpus=scaling.num_workers * scaling.cpus_per_worker + DATA_CPUS,
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
    wanted_cpus = scaling.num_workers * scaling.cpus_per_worker + DATA_CPUS
    if places >= scaling.num_workers and cpus >= wanted_cpus:
        return ""
    gpus = sum(node.get("GPU", 0) for node in nodes)
    need = " and ".join(f"{amount:g} {name}" for name, amount in each.items())
    return (
        f"the Ray cluster is too small: {scaling.num_workers} workers with {need} each, and "
        f"{DATA_CPUS} CPU for data, need {wanted_cpus} CPUs"
        + (f" and {scaling.num_workers} GPUs" if scaling.use_gpu else "")
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
