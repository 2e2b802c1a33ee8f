"""One attempt of a run that trains a network, from its config to its summary.

The function `fit` that is passed to `run` decides whether Ray, torchrun or nothing starts the workers.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar

from trainyard_trainer.attempt.checks import check, check_data, check_start, try_own_recipe
from trainyard_trainer.attempt.records import describe, record_attempt
from trainyard_trainer.attempt.summary import AttemptEnd, last_and_delivered, summarise
from trainyard_trainer.checkpointing import resume
from trainyard_trainer.checkpointing.checkpoint import VALIDATION, Checkpoints, SavedCheckpoint
from trainyard_trainer.config.data.section import Data, Table
from trainyard_trainer.config.data.sources import absolute
from trainyard_trainer.config.trainer_config import BoostingConfig, TrainerConfig, code_of
from trainyard_trainer.config.training.own_recipe import OwnData, OwnRecipe
from trainyard_trainer.config.training.train import ImageClassification, Train
from trainyard_trainer.data.image_stream import open_image_stream
from trainyard_trainer.data.loading.rows import RunData
from trainyard_trainer.data.loading.user_dataset import UserDataset
from trainyard_trainer.data.preparation import run_data
from trainyard_trainer.data.sources.rows.kept_versions import keep_versions, kept_versions
from trainyard_trainer.engine.outcome import Outcome
from trainyard_trainer.engine.task import TrainingTask
from trainyard_trainer.errors import Diverged
from trainyard_trainer.recipes.initial_weights import note_weights, pinned_weights
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.recipes.saved_model import deliver
from trainyard_trainer.run_files.driver_output import SUMMARY, record_line
from trainyard_trainer.run_folder import code_archive, stop_signals
from trainyard_trainer.run_folder.attempt_scope import running_attempt, say
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.log import Output, ProgressPrinter
from trainyard_trainer.run_folder.measurements.progress import Length, Recorder, Trained
from trainyard_trainer.run_folder.measurements.startup import Startup
from trainyard_trainer.run_folder.ownership.lease import Lease
from trainyard_trainer.run_folder.run_limit import limited
from trainyard_trainer.run_folder.run_record import RunRecord, without_record

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
