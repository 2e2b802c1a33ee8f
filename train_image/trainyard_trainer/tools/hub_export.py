"""Export a fine-tuned language model as a folder that Transformers, PEFT and servers read."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pyarrow import fs

from trainyard_trainer.config.training.recipes import CAUSAL_LM
from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.causal_lm.hub_folder import write_adapter, write_model
from trainyard_trainer.recipes.causal_lm.recipe import CausalLanguage
from trainyard_trainer.recipes.saved_model import Saved
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.storage import open_filesystem


def export_hub_folder(
    saved: Saved, folder: RunFolder, *, out: str | None, endpoint: str | None, merges: bool
) -> str:
    """Write the adapter, or all weights if there is none or `merges`; return the folder for display.

    The default is a folder in the run's folder, below export/. Raises ConfigError if it is not empty.
    """
    facts = saved.facts
    if facts["recipe"] != CAUSAL_LM:
        raise ConfigError(
            f"--format huggingface and --merge are for runs of train.recipe = {CAUSAL_LM}, and "
            f"{facts['run']} is one of {facts['recipe']}"
        )
    filesystem = folder.filesystem
    path = f"{folder.root}/export/{facts['run']}-{facts['checkpoint']}{'-merged' if merges else ''}"
    if out is not None:
        filesystem, path = open_filesystem(out, endpoint)
    target = RunFolder(filesystem, path)
    (info,) = target.infos([path])
    if info.type == fs.FileType.File or target.files():
        raise ConfigError(
            f"{target.show(path)} exists already, and is not empty: name another folder with --out"
        )
    recipe = saved.recipe
    assert isinstance(recipe, CausalLanguage)
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "model"
        if recipe.config.adapter is not None and not merges:
            write_adapter(made, recipe, saved.weights, facts)
        else:
            write_model(made, recipe, saved.build(), facts)
        for file in sorted(made.iterdir()):
            target.upload(file, f"{path}/{file.name}")
    return target.show(path)
