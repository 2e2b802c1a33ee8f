"""Compare the weights in a model's files with its config. Only the headers of the files are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import CRITICAL
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainyard_trainer.errors import ConfigError
from trainyard_trainer.recipes.causal_lm.folder import (
    explained,
    read_config,
    require_causal,
    weight_files,
)
from trainyard_trainer.recipes.initial_weights import differences

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The data types of weights that can be read, as safetensors names them."""

OTHER_DTYPE = torch.uint8
"""Stands for all other data types, such as those of masks and of quantised weights."""

TRAINABLE_QUANTISATION = frozenset({"mxfp4"})
"""Methods of quantisation whose weights Transformers converts to bf16 as it reads them."""


def check_weights(path: str) -> str | None:
    """Compare names, shapes and data types of all weights with the config. Return a note, if there is one.

    Transformers converts the weights to those of the model, without their values. Raises ConfigError if they
    do not fit.
    """
    known = read_config(path)
    require_readable(path, known)
    stored = stored_tensors(path)
    if getattr(known, "quantization_config", None):
        return None  # the names of its weights are known to the method alone
    loaded = _loaded(path, known, stored)
    if loaded is None:  # building the model tells what is wrong
        return None
    model, found = loaded
    require_causal(model, path)
    unexpected = sorted(found["unexpected_keys"])
    refuse_differences(path, found, unexpected)
    wanted = model.state_dict()
    if other := [name for name in stored if name in wanted and stored[name].dtype == OTHER_DTYPE]:
        raise ConfigError(
            f"train.model.path = {path}: {len(other)} weights are neither {', nor '.join(DTYPES)}, such as "
            f"{other[0]}.\n       Use the model with weights of one of these data types."
        )
    if not unexpected:
        return None
    return (
        f"model: {len(unexpected)} weights of {path} are not part of a {type(model).__name__} as config.json "
        f"describes it, and are left out, such as {unexpected[0]}"
    )


def require_readable(path: str, known: PretrainedConfig) -> None:
    """Raise ConfigError for quantised weights, which cannot be trained."""
    quantisation: Any = getattr(known, "quantization_config", None)
    if not quantisation:
        return
    found = quantisation if isinstance(quantisation, Mapping) else quantisation.to_dict()
    method = str(found.get("quant_method"))
    if method not in TRAINABLE_QUANTISATION:
        raise ConfigError(
            f"train.model.path = {path}: its weights are quantised ({method}), and such weights cannot be "
            "trained.\n       Use the model that it was made from, in bf16 or float32."
        )


def stored_tensors(path: str) -> dict[str, Tensor]:
    """Return all weights in the files of a folder without their values. Raises ConfigError."""
    from safetensors import safe_open

    files = weight_files(path)
    found: dict[str, Tensor] = {}
    for file in sorted({*files.values()}):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no mapping
                header = weights.get_slice(name)
                dtype = DTYPES.get(header.get_dtype(), OTHER_DTYPE)
                found[name] = torch.empty(header.get_shape(), dtype=dtype, device="meta")
    if missing := sorted(files.keys() - found.keys()):
        raise ConfigError(
            f"train.model.path = {path}: {Path(files[missing[0]]).name} lacks {missing[0]}, which the index "
            f"names, and {len(missing) - 1} more weights are missing. Copy the folder again."
        )
    return found


def _loaded(
    path: str, known: PretrainedConfig, stored: Mapping[str, Tensor]
) -> tuple[Any, Mapping[str, Any]] | None:
    """Return the model with the stored weights, and what differs; None for no model of Transformers."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(known), None)
    if kind is None:
        return None
    with explained(path), _without_reports():
        try:
            loaded: tuple[Any, Mapping[str, Any]] = kind.from_pretrained(
                None,
                config=known,
                state_dict=dict(stored),
                device_map="meta",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told by the caller, with names and shapes
            )
        except RuntimeError as error:
            # Transformers tells only in its log which weights it could not join.
            raise ConfigError(
                f"train.model.path = {path}: Transformers cannot join the weights of the files to those of "
                f"a {kind.__name__} as config.json describes it: some are missing, or have another shape, "
                "such as those of experts.\n       Copy the folder again."
            ) from error
    return loaded


def refuse_differences(path: str, found: Mapping[str, Any], near: Sequence[str]) -> None:
    """Raise ConfigError if weights are missing or have another shape, by what Transformers has found.

    `near` has names of weights in the files that the model does not use.
    """
    shapes = {name: (tuple(wanted), tuple(has)) for name, has, wanted in found["mismatched_keys"]}
    missing = sorted(found["missing_keys"])
    problems = [
        *differences("are missing in the files", missing, near, {}),
        *differences("have another shape", sorted(shapes), (), shapes),
    ]
    if problems:
        raise ConfigError(
            f"train.model.path = {path}: its weights are not those that its config.json describes:\n       "
            + "\n       ".join(problems)
            + "\n       Copy the folder again. With train.model.init: random no weights are read."
        )


@contextmanager
def _without_reports() -> Iterator[None]:
    """Keep Transformers from printing a table of the differences."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
