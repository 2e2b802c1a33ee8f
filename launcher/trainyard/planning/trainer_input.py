"""Build the trainer's config from the run file and the plan's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from trainyard.planning.sizing.layout import batch_share
from trainyard.planning.sizing.pod_sizes import DataGroup
from trainyard.platform import Platform, Pool
from trainyard.run_file.code.code_archive import Overlay
from trainyard.run_file.models import (
    BoostingRun,
    CommandRun,
    FunctionRun,
    NetworkRun,
    OwnRecipeRun,
    RecipeRun,
    RunConfig,
    UserCodeRun,
)
from trainyard_trainer.config.scaling import DATA_LABELS, Scaling
from trainyard_trainer.config.storage import Storage
from trainyard_trainer.config.trainer_config import (
    AnyConfig,
    BoostingConfig,
    BuiltInConfig,
    CommandConfig,
    FunctionConfig,
    OwnRecipeConfig,
)

AnyRun = TypeVar("AnyRun", bound=RunConfig)
AnyNetworkRun = TypeVar("AnyNetworkRun", bound=NetworkRun)

LAUNCH_KEYS = {
    "image",
    "resources",
    "queue",
    "network",
    "volumes",
    "labels",
    "annotations",
    "notify",
}
"""Keys of a run file that only the launcher reads, and `notify`, for which the platform has a default."""


def trainer_config(
    run: RunConfig, scaling: Scaling, storage: Storage, code: Overlay | None = None
) -> AnyConfig:
    """Build the trainer's config from the run file. Raises ConfigError if workers cannot divide a batch."""
    if isinstance(run, UserCodeRun):
        return _user_code_config(run, scaling, storage, code)
    common = _common(run, scaling, storage)
    if isinstance(run, BoostingRun):
        return BoostingConfig(data=run.data, train=run.train, checkpoint=run.checkpoint, **common)
    assert isinstance(run, RecipeRun | OwnRecipeRun)
    for workers in scaling.sizes:
        batch_share(run, workers)
    common |= {"train": run.train, "data": run.data, "checkpoint": run.checkpoint}
    if isinstance(run, OwnRecipeRun):
        return OwnRecipeConfig(code_sha256=None if code is None else code.sha256, **common)
    return BuiltInConfig(**common)


def _common(run: RunConfig, scaling: Scaling, storage: Storage) -> dict[str, Any]:
    """Return the keys of the trainer's config that all kinds of run have."""
    return {
        "name": run.name,
        "faults": run.faults,
        "limits": run.limits,
        "scaling": scaling,
        "storage": storage,
        "env": run.env,
        "secrets": run.secrets,
        "notify": run.notify,
    }


def _user_code_config(
    run: UserCodeRun, scaling: Scaling, storage: Storage, code: Overlay | None
) -> CommandConfig | FunctionConfig:
    common: dict[str, Any] = {
        **_common(run, scaling, storage),
        "code_sha256": None if code is None else code.sha256,
    }
    if isinstance(run, FunctionRun):
        return FunctionConfig(
            function=run.function,
            train_loop_config=run.train_loop_config,
            datasets=run.datasets,
            **common,
        )
    assert isinstance(run, CommandRun)
    return CommandConfig(
        command=run.command, run_with=run.run_with, library_hook=run.library_hook, **common
    )


def launch_of(
    run: RunConfig, image: str, pools: Sequence[Pool], data: DataGroup | None
) -> dict[str, Any]:
    """Return the keys of the run file that the trainer's config lacks or may replace; see `LAUNCH_KEYS`.

    Image and pools are those that were chosen. Together with the trainer's config they make a run file that
    gives the same plan again (`trainyard reproduce`).
    """
    nodes = run.resources.data
    if nodes is not None and data is not None:
        nodes = nodes.model_copy(update={"pool": data.pool})
    names = tuple(pool.name for pool in pools)
    pool = names if len(names) > 1 else names[0]
    resources = run.resources.model_copy(update={"pool": pool, "data": nodes})
    chosen = run.model_copy(update={"image": image, "resources": resources})
    launch = chosen.model_dump(mode="json", include=LAUNCH_KEYS)
    for key in ("cluster", "topology_mode"):
        if launch["resources"][key] is None:
            del launch["resources"][key]  # so that older submissions keep their names
    return launch


def with_receiver(run: AnyRun, platform: Platform) -> AnyRun:
    """Return the run with the platform's receiver of messages, if the run file names none."""
    return run if run.notify is not None else run.model_copy(update={"notify": platform.notify})


def with_data_nodes(run: AnyNetworkRun) -> AnyNetworkRun:
    """Return the run with its Ray loader restricted to the nodes of `resources.data`."""
    data = run.data.model_copy(update={"ray_nodes": DATA_LABELS})
    return run.model_copy(update={"data": data})
