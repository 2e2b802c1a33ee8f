"""What is printed and recorded when an attempt of a run begins."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime, timezone

from trainyard_trainer.checkpointing.checkpoint import SavedCheckpoint
from trainyard_trainer.config.trainer_config import RecipeConfig, TrainerConfig, code_of
from trainyard_trainer.config.training.batch_share import share_batch
from trainyard_trainer.data.image_stream import ImageStream
from trainyard_trainer.data.loading.rows import RunData, stream_of
from trainyard_trainer.data.loading.user_dataset import UserDataset
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.measurements.progress import Length, Reached
from trainyard_trainer.run_folder.measurements.startup import Startup, program_age_s
from trainyard_trainer.run_folder.run_record import RunRecord
from trainyard_trainer.run_folder.submission import record_submission
from trainyard_trainer.versions import NETWORKS, versions


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
