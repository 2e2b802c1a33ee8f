"""The folder of a model of Transformers: its config, its weights by name, and a hash of both."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyarrow import fs

from trainyard_trainer.data.sources.tokens.tokenizer_folder import reason_of
from trainyard_trainer.errors import ConfigError, TrainerError
from trainyard_trainer.storage import StorageFolder

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

LFS = b"version https://git-lfs"
"""The begin of a file that stands for another one, which Git LFS has not fetched."""

STATEFUL_LAYERS = frozenset({"conv", "linear_attention", "hybrid", "hybrid_sliding"})
"""The types of layers in a config of Transformers that carry a state from token to token."""

MASK_BY_POSITIONS = re.compile(
    r'mask\w*\((?:[^()]|\([^()]*\))*?\bposition_ids=|"position_ids": \w*position_ids'
)
"""What the source of a model has where its masks follow position ids: the argument of a call, or of `**`."""


def read_config(path: str) -> PretrainedConfig:
    """Read the config of a model's folder. Raises ConfigError if there is none that Transformers knows."""
    require_folder(path)
    from transformers import AutoConfig

    with explained(path):
        found: PretrainedConfig = AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    return found


def require_separate_texts(path: str, known: PretrainedConfig) -> None:
    """Raise ConfigError for a model whose texts would see each other where they share a packed row.

    Only attention whose mask follows position ids keeps them apart.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(known), None)
    if model is None:  # building it tells what is wrong
        return
    layers = STATEFUL_LAYERS.intersection(
        getattr(known.get_text_config(), "layer_types", None) or ()
    )
    if model._is_stateful or layers:
        reason = "has layers that carry a state from one text to the next"
    elif not MASK_BY_POSITIONS.search(inspect.getsource(sys.modules[model.__module__])):
        reason = "computes its attention masks without position ids, which tell texts apart"
    else:
        return
    raise ConfigError(
        f"train.packing puts several texts into a row, and the model in {path} ({model.__name__}) {reason}.\n"
        "       Set train.packing: false."
    )


def require_causal(model: Any, path: str) -> None:
    """Raise ConfigError for a model that sees the tokens behind each place, as BERT does."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    known: Any = model.config
    is_causal = getattr(known, "is_decoder", False) or getattr(known, "causal", False)
    if known.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not is_causal:
        raise ConfigError(
            f"train.model.path = {path}: {type(model).__name__} sees the tokens behind each place, so it "
            "cannot learn to predict the next one.\n       Use a model for causal language modelling."
        )


def require_folder(path: str) -> None:
    """Raise ConfigError if there is no folder with a config. Transformers would ask the network for it."""
    folder = Path(path)
    if not folder.is_dir():
        found = "it is a file" if folder.exists() else "there is none"
        raise ConfigError(f"train.model.path = {path} has to be a folder, and {found}")
    if not (folder / CONFIG).is_file():
        names = sorted(each.name for each in folder.iterdir())
        raise ConfigError(
            f"train.model.path = {path} has no {CONFIG}, but {', '.join(names[:5]) or 'no files'}.\n"
            "       Use a folder that save_pretrained of Transformers wrote, or one of the Hugging Face Hub."
        )


def without_progress_bars() -> None:
    """Keep Transformers from drawing a bar for each file that it reads or writes."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def weight_files(path: str) -> dict[str, Path]:
    """Return the file of each weight by the weight's name. Raises ConfigError if there are none."""
    folder = Path(path)
    if (folder / INDEX).is_file():
        names = weight_map(folder / INDEX, path)
        missing = sorted({file for file in names.values() if not (folder / file).is_file()})
        if missing:
            raise ConfigError(
                f"train.model.path = {path} lacks {missing[0]} and {len(missing) - 1} more files of "
                f"{INDEX}. Copy the folder again."
            )
        for file in {*names.values()}:
            _weights_in(folder / file, path)
        return {name: folder / file for name, file in names.items()}
    if not (folder / SINGLE).is_file():
        raise ConfigError(
            f"train.model.path = {path} has no weights: neither {SINGLE} nor {INDEX}.\n"
            "       Use a folder with safetensors, or train.model.init: random."
        )
    return dict.fromkeys(_weights_in(folder / SINGLE, path), folder / SINGLE)


def weight_map(index: Path, path: str) -> Mapping[str, str]:
    """Return the name of the file of each weight. Raises ConfigError for an index that does not say it."""
    try:
        names = json.loads(index.read_bytes())["weight_map"]
        is_known = all(Path(file).name == file for file in names.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        is_known = False
    if not is_known:
        raise ConfigError(
            f"train.model.path = {path}: {INDEX} has no weight_map from the names of weights to those of "
            "files beside it. Copy the file again."
        )
    found: Mapping[str, str] = names
    return found


def _weights_in(file: Path, path: str) -> Sequence[str]:
    """Return the names of the weights in a file. Raises ConfigError if it is not whole."""
    from safetensors import SafetensorError, safe_open

    with file.open("rb") as stream:
        if stream.read(len(LFS)) == LFS:
            raise ConfigError(
                f"train.model.path = {path}: {file.name} is not the file itself, but a pointer of Git LFS. "
                "Fetch it: git lfs pull."
            )
    try:
        with safe_open(file, framework="pt") as weights:
            return list(weights.keys())
    except SafetensorError as error:
        raise ConfigError(
            f"train.model.path = {path}: {file.name} is no whole file of safetensors: {error}. Copy it again."
        ) from None


def fingerprint(path: str, known: Mapping[str, str] | None = None) -> str:
    """Return a SHA-256 of the names and contents of the config and of all files with weights.

    `known` has the SHA-256 of each file by its name, where they need not be computed.
    """
    files = sorted({Path(path) / CONFIG, *weight_files(path).values()})
    if known is None:
        folder = StorageFolder(fs.LocalFileSystem(), path)
        with ThreadPoolExecutor() as pool:
            found = pool.map(folder.sha256, map(str, files))
            known = {file.name: sha256 for file, sha256 in zip(files, found, strict=True)}
    lines = [f"{file.name} {known[file.name]}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@contextmanager
def explained(path: str) -> Iterator[None]:
    """Raise ConfigError in place of what Transformers raises for a folder that it does not understand."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:  # a config may make any line of a model fail
        raise ConfigError(
            f"train.model.path = {path} is no model that Transformers can use: {reason_of(error)}"
        ) from error
