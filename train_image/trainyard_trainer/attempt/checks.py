"""The checks of a run that trains a network, before it begins to train: its config, its data, its model."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from pydantic_core import PydanticCustomError

from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.config.training.batch_share import share_batch
from trainyard_trainer.config.training.own_recipe import OwnRecipe
from trainyard_trainer.config.training.train import require_goals
from trainyard_trainer.data.loading.rows import RunData, read_stand_in
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.initial_weights import check_initial_weights
from trainyard_trainer.recipes.networks import require_networks
from trainyard_trainer.recipes.recipe import collate_of
from trainyard_trainer.recipes.registry import recipe_of
from trainyard_trainer.recipes.trial import try_recipe
from trainyard_trainer.run_folder.measurements.progress import Length
from trainyard_trainer.user_import import user_errors


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
