"""One attempt of a run that trains a network, from its config to its summary.

The function `fit` that is passed to `run` decides whether Ray, torchrun or nothing starts the workers.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from pydantic_core import PydanticCustomError

from trainyard_trainer.checkpointing import resume
from trainyard_trainer.checkpointing.checkpoint import (
    VALIDATION,
    Checkpoints,
    Damaged,
    SavedCheckpoint,
)
from trainyard_trainer.checkpointing.retention import best_of
from trainyard_trainer.config.data.section import Data, Table
from trainyard_trainer.config.data.sources import absolute
from trainyard_trainer.config.trainer_config import (
    BoostingConfig,
    RecipeConfig,
    TrainerConfig,
    code_of,
)
from trainyard_trainer.config.training.batch_share import share_batch
from trainyard_trainer.config.training.metric import LOSS, VALIDATION_PREFIX
from trainyard_trainer.config.training.own_recipe import OwnData, OwnRecipe
from trainyard_trainer.config.training.recipes import best_goal, metrics_of
from trainyard_trainer.config.training.train import ImageClassification, Train, require_goals
from trainyard_trainer.data.image_stream import ImageStream, open_image_stream
from trainyard_trainer.data.loading.rows import RunData, read_stand_in, stream_of
from trainyard_trainer.data.loading.user_dataset import UserDataset
from trainyard_trainer.data.preparation import run_data
from trainyard_trainer.data.sources.rows.kept_versions import keep_versions, kept_versions
from trainyard_trainer.engine.outcome import Outcome
from trainyard_trainer.engine.task import TrainingTask
from trainyard_trainer.errors import ConfigError, Diverged, RunError
from trainyard_trainer.recipes.initial_weights import (
    check_initial_weights,
    note_weights,
    pinned_weights,
)
from trainyard_trainer.recipes.networks import require_networks
from trainyard_trainer.recipes.recipe import collate_of
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.recipes.saved_model import deliver
from trainyard_trainer.recipes.trial import try_recipe
from trainyard_trainer.run_files.driver_output import SUMMARY, record_line
from trainyard_trainer.run_folder import code_archive, stop_signals
from trainyard_trainer.run_folder.attempt_scope import (
    running_attempt,
    say,
)
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.log import Output, ProgressPrinter
from trainyard_trainer.run_folder.measurements.goodput import measure
from trainyard_trainer.run_folder.measurements.progress import (
    Length,
    Reached,
    Recorder,
    Trained,
    cleaned,
    measured_phases,
    read_lines,
)
from trainyard_trainer.run_folder.measurements.startup import Startup, program_age_s
from trainyard_trainer.run_folder.ownership.lease import Lease
from trainyard_trainer.run_folder.run_limit import limited
from trainyard_trainer.run_folder.run_record import RunRecord, without_record
from trainyard_trainer.run_folder.submission import record_submission
from trainyard_trainer.user_import import user_errors
from trainyard_trainer.versions import NETWORKS, versions

Fit = Callable[[TrainingTask, RunFolder, Lease], Outcome]
"""A function that trains the remaining steps of a run with `scaling.num_workers` workers, while it holds the
lease."""

AnyRecipe = TypeVar("AnyRecipe", TrainerConfig, BoostingConfig)


def run(config: TrainerConfig, output: Output, fit: Fit) -> None:
    """Train the remaining steps of a run, then write its model, report and summary.

    Raises TrainerError.
    """
    startup = Startup(began=time.time())
    config = with_absolute_path(config)
    folder = RunFolder.open(config.storage.path, config.name, config.storage.endpoint)

    # The checks that need no data come first, before anything in the run's folder changes.
    code = code_of(config)
    if code is not None:
        code_archive.make_importable(folder, code)
    resume.check_identity(folder, config)
    # The record in the run's folder keeps the address as the run file has it.
    written, config = config, with_pinned_model(config, folder)
    parameters = check(config)
    with Lease.acquire(folder, say) as lease:
        startup.reach("lease")
        attempt = lease.attempt
        failed = lambda error: summarise(  # noqa: E731
            config, folder, AttemptEnd.failed(attempt, folder, error)
        )
        record = RunRecord(folder, written, lease, code_sha256=code)
        retries = config.faults.retries
        with (
            running_attempt(folder, lease, output, failed, retries=retries, record=record),
            limited(folder, config),
        ):
            if code is not None:
                code_archive.store(folder, code)
            data = open_data(config, folder)
            length = check_data(config, data)
            recipe_of(config, data.info).prepare(folder, say)
            start = resume.choose(folder)
            if start is None:
                starts_from = check_start(config)
                if config.train.init is not None:
                    note_weights(config.train.init, folder)
                try_own_recipe(config, data)
            else:
                starts_from = f"start: checkpoint {start.name}"
            record_attempt(config, folder, record, start, startup)
            describe(config, folder, data, length, parameters, attempt, starts_from)

            recipe, workers = recipe_of(config, data.info), config.scaling.num_workers
            recorder = Recorder(
                folder,
                length,
                attempt=attempt,
                workers=workers,
                metrics=recipe.metrics,
                speeds=recipe.speeds,
            )
            task = TrainingTask(config=config, data=data, attempt=attempt, startup=startup)
            resumed_from, startup = train_what_is_left(
                start, recorder, startup, output, lambda: fit(task, folder, lease)
            )
            lease.check()
            summary = finish(config, folder, data, length, record, resumed_from, startup)
    print(record_line(SUMMARY, without_record(summary)), flush=True)


def open_data(config: TrainerConfig, folder: RunFolder) -> RunData:
    """Open the run's data set. A source that is not prepared yet is prepared in the run's folder."""
    data = config.data
    if isinstance(data, OwnData):
        if data.dataset is not None:
            return UserDataset.open(data.dataset, data.options)
        table = UserDataset.open_table(
            data,
            endpoint=config.storage.endpoint,
            seed=config.train.seed,
            versions=kept_versions(folder),
        )
        keep_versions(folder, table.versions)
        return table
    assert isinstance(data, Data)
    if data.stream:
        assert isinstance(config.train, ImageClassification)
        stream = open_image_stream(
            data,
            storage_endpoint=config.storage.endpoint,
            seed=config.train.seed,
            model=config.train.model,
            versions=kept_versions(folder),
        )
        keep_versions(folder, stream.versions)
        return stream
    return run_data.open_data(
        data,
        folder,
        form=recipe_of(config).prepare_options(),
        storage_endpoint=config.storage.endpoint,
        say=say,
    )


def with_absolute_path(config: AnyRecipe) -> AnyRecipe:
    """Return the config with absolute paths, since workers have another working directory."""
    data = config.data
    if isinstance(data, Data | Table):
        sources = {"source": data.source, "valid_source": data.valid_source}
        found = {key: source and absolute(source) for key, source in sources.items()}
        data = data.model_copy(update=found)
    elif isinstance(data, OwnData) and data.source is not None:
        data = data.model_copy(update={"source": absolute(data.source)})
    train = config.train.absolute() if isinstance(config.train, Train) else config.train
    changes = {"storage": config.storage.absolute(), "data": data, "train": train}
    return config.model_copy(update=changes)


def with_pinned_model(config: TrainerConfig, folder: RunFolder) -> TrainerConfig:
    """Return the config with a version of the model that does not change while the run lasts."""
    train, changes = config.train, {}
    if train.init is not None:
        changes["init"] = pinned_weights(train.init, folder)
    if not isinstance(train, OwnRecipe):
        changes["model"] = recipe_of(config).pinned_model(folder)
    return config.model_copy(update={"train": train.model_copy(update=changes)})


def train_what_is_left(
    start: SavedCheckpoint | None,
    recorder: Recorder,
    startup: Startup,
    output: Output,
    fit: Callable[[], Outcome],
) -> tuple[str | None, Startup]:
    """Train with `fit`, unless the checkpoint `start` is the end of the run already.

    Return the name of the checkpoint from which the run resumed, and the times of the start.
    Raises Diverged.
    """
    trained = start.trained if start else Trained()
    recorder.show_start(trained)
    if start is not None and trained.is_complete(recorder.length.epochs):
        say(f"the run is trained already: checkpoint {start.name} is its end")
        return start.name, startup
    startup.reach("prepare")
    with ProgressPrinter(recorder.folder, output, recorder.attempt):
        outcome = fit()
    if outcome.diverged:
        raise Diverged(outcome.diverged)
    return outcome.resumed_from, outcome.startup


def fetch_here(task: TrainingTask, folder: RunFolder) -> None:
    """Fetch to this machine what workers read from elsewhere, and record it. Raises TrainerError."""
    recipe = recipe_of(task.config, task.data.info)
    if recipe.fetches_files:
        recipe.note_fetched(folder, [recipe.fetch()])


def fit_here(work: Callable[[], Outcome], folder: RunFolder, attempt: int) -> Outcome:
    """Train in this process. At the first SIGTERM, save a checkpoint and raise StoppedBySignal."""
    # From here on, SIGTERM only writes the file that asks the training loop to save and stop.
    stop = folder.stop(attempt)
    signal.signal(signal.SIGTERM, lambda signum, frame: folder.write(stop, ""))
    outcome = work()
    stop_signals.fail_on_sigterm()
    if outcome.is_stopped:
        raise stop_signals.StoppedBySignal
    return outcome


# Checks.


def check(config: TrainerConfig) -> int:
    """Check the config without its data, and return the number of the model's parameters.

    Raises ConfigError.
    """
    train = config.train
    if train.fsdp2 and train.fsdp2.cpu_offload and not config.scaling.use_gpu:
        raise ConfigError(
            "train.fsdp2.cpu_offload = true takes weights off a GPU, and this run has none.\n"
            "       Use false, or resources.gpus."
        )
    if train.deepspeed and train.deepspeed.offload != "none" and not config.scaling.use_gpu:
        raise ConfigError(
            f"train.deepspeed.offload = {train.deepspeed.offload} takes weights off a GPU, and this run has "
            "none.\n       Use none, or resources.gpus."
        )
    if train.strategy == "deepspeed" and find_spec("deepspeed") is None:
        raise ConfigError(
            "train.strategy = deepspeed needs DeepSpeed, which is not installed here.\n"
            "       pip install 'trainyard[deepspeed]', or use strategy fsdp2."
        )
    try:
        for workers in config.scaling.sizes:
            share_batch(config.train, workers)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return count_parameters(config)


def check_start(config: TrainerConfig) -> str:
    """Describe with which weights a new run starts. Raises ConfigError if the file does not fit the model."""
    init = config.train.init
    if init is None:
        return f"start: {recipe_of(config).first_weights()}"
    with torch.device("meta"):
        model = recipe_of(config).build_model()
    fit = check_initial_weights(init, config.storage.endpoint, model)
    random = f"; random: {', '.join(fit.random)}" if fit.random else ""
    return f"start: {len(fit.names)} tensors of {init.path}{random}"


def count_parameters(config: TrainerConfig) -> int:
    """Return the number of the model's parameters. Raises ConfigError if there is no such model."""
    if not isinstance(config.train, OwnRecipe):
        return recipe_of(config).check()
    recipe = recipe_of(config)
    try:
        require_goals(config.train, config.checkpoint, recipe.metrics)
    except PydanticCustomError as error:
        raise ConfigError(str(error)) from None
    with user_errors(f"train.recipe = {config.train.recipe}: build_model"):
        with torch.device("meta"):
            model = recipe.build_model()
        require_networks(recipe, config.train, model)
        return recipe.check()


def try_own_recipe(config: TrainerConfig, data: RunData) -> None:
    """Try a recipe of the user on the first samples. Raises ConfigError for what would fail on workers."""
    if isinstance(config.train, OwnRecipe):
        recipe, seed = recipe_of(config, data.info), config.train.seed
        with user_errors(f"train.recipe = {config.train.recipe}: collate"):
            batch = read_stand_in(data, seed=seed, collate=collate_of(recipe))
        try_recipe(recipe, batch, config.train.recipe)


def check_data(config: TrainerConfig, data: RunData) -> Length:
    """Return the length of the run. Raises ConfigError if model or batches do not fit the data."""
    recipe_of(config, data.info).check_fit()
    length = Length.of(config, data.num_train)
    for workers in config.scaling.sizes:
        check_share(config, length, workers)
    return length


def check_share(config: TrainerConfig, length: Length, workers: int) -> None:
    """Raise ConfigError if a worker gets a single sample in some pass, and the model needs at least two.

    `workers` is the number of workers.
    """
    micro = share_batch(config.train, workers).micro_batch_size
    sizes = {micro}
    for size in {length.batch_size(0), length.batch_size(length.steps_per_epoch - 1)}:
        for share in {size // workers, -(-size // workers)}:
            sizes |= {share % micro} if share % micro else set()
    recipe = recipe_of(config)
    if 1 in sizes and not recipe.takes_one_sample():
        raise ConfigError(
            f"train.global_batch_size = {length.global_batch_size} over {workers} workers leaves "
            f"single {recipe.samples} of the {length.num_samples} for a step, and {recipe.title()} "
            "cannot learn from one alone (batch norm).\n"
            "       Use data.drop_last: true, another global_batch_size or micro_batch_size."
        )


# Records.


def describe(
    config: TrainerConfig,
    folder: RunFolder,
    data: RunData,
    length: Length,
    parameters: int,
    attempt: int,
    starts_from: str,
) -> None:
    """Print the versions, the data, the model, the plan and the start of the attempt."""
    recipe, workers = recipe_of(config, data.info), config.scaling.num_workers
    share = share_batch(config.train, workers)
    fewest = config.scaling.min_workers
    at_least = f", at least {fewest} of them," if fewest else ""
    passes = f" in {share.accumulation} passes" if share.accumulation > 1 else ""
    rest = (
        f"; {length.dropped_per_epoch} {recipe.samples} are left out of each epoch"
        if length.dropped_per_epoch
        else ""
    )
    bad = f", {data.bad_samples} bad ones left out" if data.bad_samples else ""
    stream = stream_of(data)
    lines = (
        f"run {config.name}, attempt {attempt}: {folder.show(folder.root)}",
        "versions: " + ", ".join(f"{name} {version}" for name, version in versions().items()),
        f"data: {data.info.source}, {data.num_train:,} training and {data.num_valid:,} validation "
        f"{recipe.describe()}{bad}, by the {config.data.loader} loader",
        *versions_read(data),
        *([stream.describe()] if stream else []),
        f"model: {recipe.title()}, {parameters:,} parameters",
        f"plan: {length.epochs} epochs of {length.steps_per_epoch} steps of "
        f"{length.global_batch_size} {recipe.samples}, {share.samples} on each of {workers} workers{at_least}"
        f"{passes}{rest}",
        starts_from,
    )
    print("\n".join(lines), flush=True)


def versions_read(data: RunData) -> list[str]:
    """Return a line for each data set with versions that the run reads where it lies."""
    if not isinstance(data, ImageStream | UserDataset):
        return []
    return [
        f"version {version.number} of {address} is read by all attempts"
        for address, version in data.versions.items()
    ]


def record_attempt(
    config: RecipeConfig,
    folder: RunFolder,
    record: RunRecord,
    start: SavedCheckpoint | None,
    startup: Startup,
    packages: Sequence[str] = NETWORKS,
) -> None:
    """Record in the run's folder that an attempt begins, with its versions and its submission."""
    line = {
        "attempt": record.attempt.attempt,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "began": round(startup.began, 3),
        "imports_s": round(program_age_s() - (time.time() - startup.began), 3),
        "lease_s": round(startup.seconds["lease"], 3),
        **Reached.by(folder).to_json(),
        "resumed_from": start.name if start else None,
        "workers": config.scaling.num_workers,
        "versions": versions(packages),
    }
    folder.append(folder.attempts, json.dumps(line) + "\n")
    record.begin()
    record_submission(folder, code_of(config))


# Ends.


def finish(
    config: TrainerConfig,
    folder: RunFolder,
    data: RunData,
    length: Length,
    record: RunRecord,
    resumed_from: str | None,
    startup: Startup,
) -> dict[str, Any]:
    """Write the model, the report and the summary for the delivered checkpoint, and return the summary."""
    from trainyard_trainer.report.report import write_report  # imports matplotlib, which is slow

    checkpoints = Checkpoints(folder)
    last, delivered = last_and_delivered(checkpoints, config, config.train.epochs, "epoch")
    deliver(folder, checkpoints, delivered)
    end = AttemptEnd(
        attempt=record.attempt.attempt, resumed_from=resumed_from, last=last, error=None
    )
    summary = summarise(config, folder, end) | record.end()
    summary |= {
        "checkpoint": delivered.name,
        "bad_samples": data.bad_samples,
        "dropped_per_epoch": length.dropped_per_epoch,
        "startup": startup.to_json(),
    }
    validation = checkpoints.load(delivered.name, VALIDATION)
    recipe = recipe_of(config, data.info)
    own = recipe.report(folder, config, data, summary, validation)
    write_report(folder, config, data, summary, own, recipe.metrics)
    folder.write(folder.summary, json.dumps(summary, indent=2))
    return summary


def last_and_delivered(
    checkpoints: Checkpoints, config: RecipeConfig, epochs: int, unit: str
) -> tuple[SavedCheckpoint, SavedCheckpoint]:
    """Return the checkpoint at the end of training, and the one whose weights the run delivers.

    Raises RunError if the first is missing, or one of them is damaged.
    """
    folder = checkpoints.folder
    last = resume.choose(folder, print)
    if last is None or not last.trained.is_complete(epochs):
        raise RunError(
            f"training ended, but the last intact checkpoint in {folder.show(folder.checkpoints)} "
            f"is {f'{last.name} of {unit} {last.trained.epoch}' if last else 'missing'}. "
            "Start the run again: it goes on from there."
        )
    is_last = config.checkpoint.deliver == "last"
    return last, last if is_last else best_intact(checkpoints, config)


def best_intact(checkpoints: Checkpoints, config: RecipeConfig) -> SavedCheckpoint:
    """Return the best checkpoint.

    Raises RunError if it is damaged. The next best may be much worse, so that the user has to decide.
    """
    goal = best_goal(config.train, config.checkpoint.best)
    best = best_of(resume.descended(checkpoints.folder), goal)
    assert best is not None  # `last_and_delivered` has found at least one
    try:
        return checkpoints.check(best.name)
    except Damaged as reason:
        raise RunError(
            f"the best checkpoint, {best.name}, cannot be delivered: {reason}.\n"
            f"       Set checkpoint.deliver: last, or remove "
            f"{checkpoints.folder.show(checkpoints.path(best.name))} for the next best, and start again."
        ) from None


def last_workers(config: TrainerConfig, folder: RunFolder) -> int:
    """Return the number of workers of the last worker group, which changes in an elastic run."""
    if not config.scaling.is_elastic or not folder.exists(folder.progress):
        return config.scaling.num_workers
    workers: int = json.loads(folder.read(folder.progress))["workers"]
    return workers


def speeds_of(config: TrainerConfig, folder: RunFolder, trained: Trained) -> dict[str, float]:
    """Return the speed in the units of the recipe, and the model FLOPs utilisation of the last epoch.

    Only workers can measure the latter, so it is read from the metrics.
    """
    told = recipe_of(config).speeds(trained.samples_per_s)
    speeds = {name: round(speed, 1) for name, speed in told.items()}
    ended = [line for line in read_lines(folder, folder.metrics) if line["kind"] == "epoch"]
    if ended and "mfu" in ended[-1]:
        speeds["mfu"] = ended[-1]["mfu"]
    return speeds


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptEnd:
    """The end of an attempt, which its summary describes."""

    attempt: int
    resumed_from: str | None
    """The name of the checkpoint from which the attempt resumed; None if it started from scratch."""
    last: SavedCheckpoint | None
    """The newest intact checkpoint of the run; None if it has none."""
    error: str | None
    """The first line of the error; None if the run has succeeded."""

    @classmethod
    def failed(cls, attempt: int, folder: RunFolder, error: str) -> AttemptEnd:
        """Return the end of an attempt that has failed with an error."""
        return cls(attempt=attempt, resumed_from=None, last=resume.choose(folder), error=error)

    @property
    def trained(self) -> Trained:
        """What the run has trained so far."""
        return self.last.trained if self.last else Trained()


def summarise(config: TrainerConfig, folder: RunFolder, end: AttemptEnd) -> dict[str, Any]:
    """Return the content of summary.json for an attempt that trains a network."""
    return summary_of(
        config,
        folder,
        end,
        best_of(resume.descended(folder), best_goal(config.train, config.checkpoint.best)),
        own=speeds_of(config, folder, end.trained),
        workers=last_workers(config, folder),
        model=folder.model,
    )


def summary_of(
    config: RecipeConfig,
    folder: RunFolder,
    end: AttemptEnd,
    best: SavedCheckpoint | None,
    *,
    own: dict[str, Any],
    workers: int,
    model: str,
) -> dict[str, Any]:
    """Return the content of summary.json for any recipe; `own` are the values of one recipe only."""
    goodput = measure(folder, end.trained, time.time())
    summary = {
        "name": config.name,
        "outcome": "failed" if end.error else "succeeded",
        **metrics_in(config, end.trained, best.trained if best else Trained()),
        **_training_length(end.trained, best),
        **own,
        "attempts": end.attempt,
        "resumed_from": end.resumed_from,
        **_training_time(config, end.trained),
        "goodput": goodput.to_json() if goodput else None,
        "workers": workers,
        "model": folder.show(model),
        "metrics": folder.show(folder.metrics),
        "report": folder.show(folder.report),
        "error": end.error,
    }
    return cleaned(summary)


def metrics_in(config: RecipeConfig, last: Trained, best: Trained) -> dict[str, float | None]:
    """Return loss and metrics at the end of training, and the validation metrics of the best checkpoint."""
    metrics = metrics_of(config.train)
    names = [*(metric.name for metric in metrics if not metric.is_validation_only), LOSS]
    validations = [
        f"{VALIDATION_PREFIX}{name}" for name in (*(each.name for each in metrics), LOSS)
    ]
    return {
        **{name: last.metrics.get(name) for name in (*validations, *names)},
        **{f"best_{name}": best.metrics.get(name) for name in validations},
    }


def _training_length(trained: Trained, best: SavedCheckpoint | None) -> dict[str, Any]:
    """Return the length and the speed of the training so far."""
    return {
        "best_epoch": best.trained.epoch if best else None,
        "epochs": trained.epoch,
        "stopped_early": trained.is_stopped_early,
        "steps": trained.step,
        "samples_seen": trained.samples,
        "samples_per_s": round(trained.samples_per_s, 1),
    }


def _training_time(config: RecipeConfig, trained: Trained) -> dict[str, Any]:
    """Return the seconds of training, and the seconds of each measured phase."""
    phases = measured_phases(config)
    return {
        "train_s": round(trained.train_s, 1),
        "seconds": {name: round(trained.seconds.get(name, 0.0), 3) for name in phases},
    }
