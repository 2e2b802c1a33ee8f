"""Run a sweep on this machine: train one run after the other, and skip those that have succeeded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from trainyard.errors import ConfigError, RunFailed, RunStopped
from trainyard.local.results import LocalFiles
from trainyard.local.tools import require_packages
from trainyard.local.training import NEEDED, is_about_lease, local_config, train_locally
from trainyard.planning.objects import pack_code
from trainyard.run_file.code.code_archive import Overlay
from trainyard.run_file.code.source import GitState
from trainyard.sweeps.combinations import Combination, naming
from trainyard.sweeps.outcomes import Goal, SweepOutcome, completed, has_trained, outcome_text
from trainyard_trainer.config.data.sources import absolute
from trainyard_trainer.config.trainer_config import AttemptConfig
from trainyard_trainer.config.training.train import Train

Object = dict[str, Any]
Say = Callable[[str], None]


def train_here(
    combinations: Sequence[Combination],
    goal: Goal,
    storage: Path,
    say: Say,
    source: GitState | None = None,
) -> Mapping[str, SweepOutcome]:
    """Check all combinations, then train them. Return the outcome of each run."""
    require_packages(NEEDED, "training")
    attempts = []
    for combination in combinations:
        with naming(combination):
            code = pack_code(combination.run, None)
            config = local_config(combination.run, storage, os.cpu_count() or 1, "ray", code)
        attempts.append((combination, config, code))
    say(f"sweep of {len(attempts)} runs, one after the other")
    outcomes: dict[str, SweepOutcome] = {}
    for combination, config, code in attempts:
        folder = LocalFiles(storage / combination.name)
        is_new = not has_trained(folder, _as_recorded(config))
        if is_new:
            say(f"{combination.name} ({combination}): running")
        outcome = (
            _train_one(config, code, source, say) if is_new else SweepOutcome(phase="succeeded")
        )
        outcomes[combination.name] = outcome = completed(outcome, folder)
        say(f"{combination.name} ({combination}): {outcome_text(outcome, goal, is_new=is_new)}")
    return outcomes


def _as_recorded(config: AttemptConfig) -> Object:
    """Return a config as the trainer records it, with absolute paths of data, models and other files."""
    train = getattr(config, "train", None)
    if isinstance(train, Train):
        config = config.model_copy(update={"train": train.absolute()})
    recorded = config.model_dump(mode="json")
    data = recorded.get("data")
    if data is None:
        return recorded
    places = {
        key: absolute(source) for key in ("source", "valid_source") if (source := data.get(key))
    }
    return recorded | {"data": data | places}


def _train_one(
    config: AttemptConfig, code: Overlay | None, source: GitState | None, say: Say
) -> SweepOutcome:
    """Train a run to its end and return its outcome. The metrics are in the run's folder."""
    try:
        with closing(train_locally(config, "ray", code, source)) as statuses:
            for status in statuses:
                if isinstance(status, str) and is_about_lease(status):
                    say(status)
    except (ConfigError, RunFailed) as error:
        return SweepOutcome(
            phase="stopped" if isinstance(error, RunStopped) else "failed",
            message=error.details[0] if error.details else error.what,
        )
    except KeyboardInterrupt:
        say(f"run {config.name} was interrupted: the same command resumes the sweep")
        raise
    return SweepOutcome(phase="succeeded")
