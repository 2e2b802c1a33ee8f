"""The tool `predict`, and which of its inputs and options exclude each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trainyard_trainer.config.location import local_problem
from trainyard_trainer.config.tools.arguments import (
    COUNT,
    LOCATION,
    NOT_NEGATIVE,
    POSITIVE,
    Argument,
    Tool,
    one_of,
    option_of,
)
from trainyard_trainer.config.tools.shared_arguments import (
    BASE_MODEL,
    CHECKPOINT,
    ENDPOINT,
    GRID,
    JSON,
    RUN,
    STORAGE,
    TRUST_CODE,
)

_OF_TEXT = ("prompt_as", "length", "temperature", "seed", "base_model")
_OF_DATA = ("image_column", "label_column")


_INPUTS = {
    "files": "FILE",
    "prompt": "--prompt",
    "chat": "--chat",
    "data": "--data",
    "split": "--split",
}
"""The inputs of `predict`, of which exactly one is given: what a user types for each key."""

_EXCLUDED = {
    "files": (*_OF_TEXT, *_OF_DATA, "trust_code"),
    "prompts": ("image_column", "grid", "top", "trust_code"),
    "prompt": (*_OF_DATA, "out", "grid", "top", "batch_size", "trust_code"),
    "chat": ("prompt_as", *_OF_DATA, "out", "grid", "top", "batch_size", "trust_code", "json"),
    "data": (*_OF_TEXT, "grid"),
    "own_data": (*_OF_TEXT, *_OF_DATA, "grid", "top"),
    "split": (*_OF_TEXT, *_OF_DATA, "grid", "top"),
}
"""Options that mean nothing with each of the inputs."""


def _predict_problem(given: Mapping[str, Any]) -> str | None:
    """Return which arguments of `predict` exclude or need each other."""
    inputs = [key for key in _INPUTS if key in given]
    if not inputs:
        return (
            "predict has no input. Name image files, or give tables of images with --data PATH and --out "
            "PATH, or give a language model its --prompt TEXT, a FILE of prompts with --out FILE, or --chat "
            "with it, or for your own recipe name a --split of its data, or --data PATH with --trust-code"
        )
    if len(inputs) > 1:
        names = [_INPUTS[key] for key in inputs]
        return f"{names[0]} and {names[1]} exclude each other: leave one out"
    (what,) = inputs
    shown = _INPUTS[what]
    if what == "files":
        urls = [file for file in given["files"] if local_problem(file)]
        if "out" in given:
            what, shown = "prompts", "FILE with --out"
            if len(given["files"]) > 1:
                return f"--out takes one FILE with prompts, and {len(given['files'])} are named"
            if not given["out"].endswith((".parquet", ".jsonl")):
                return f"--out = {given['out']} has to end in .parquet or .jsonl"
        elif urls:
            return f"FILE {urls[0]} {local_problem(urls[0])}"
    if what == "data" and given.get("trust_code"):
        what, shown = "own_data", "--data with --trust-code"
    elif what == "data" and "out" not in given:
        return (
            "--data PATH needs --out PATH: where the predictions are written. For a recipe of your own add "
            "--trust-code, which runs its code"
        )
    wrong = [option_of(key) for key in _EXCLUDED[what] if given.get(key)]
    if wrong:
        return f"{shown} and {wrong[0]} exclude each other: leave one out"
    return None


def uses_ray(given: Collection[str]) -> bool:
    """Return whether `predict` with these arguments, by key, needs Ray Data."""
    if "data" in given:
        return "trust_code" not in given
    return "files" in given and "out" in given


PREDICT = Tool(
    module="predict",
    help="Print the labels and confidences that a run's model gives to images; or answer prompts.",
    arguments=(
        RUN,
        Argument(
            name="files",
            metavar="FILE",
            kind=LOCATION,
            help="Image files, such as PNG or JPEG; or, with --out, one file of prompts for a fine-tuned "
            "model: JSON lines, a JSON list, Parquet or Arrow, also s3://bucket/file.",
            is_repeated=True,
        ),
        Argument(
            name="--prompt",
            metavar="TEXT",
            help="The text that a language model continues. A model that was fine-tuned on chats answers it.",
        ),
        Argument(
            name="--prompt-as",
            metavar="chat|text",
            kind=one_of("chat", "text"),
            help="What prompts are: a turn of the user, which the chat template renders, or a text that the "
            "model continues as it stands.",
            default_text="chat if the run was trained on chats, else text",
        ),
        Argument(
            name="--chat",
            kind=None,
            help="Chat with a fine-tuned model on the terminal; an empty line begins another chat.",
        ),
        BASE_MODEL,
        Argument(
            name="--length",
            metavar="N",
            kind=POSITIVE,
            help="The largest number of tokens of the continuation; without a tokenizer, of bytes.",
            default=200,
        ),
        Argument(
            name="--temperature",
            metavar="T",
            kind=NOT_NEGATIVE,
            help="The sampling temperature; 0 always takes the most likely byte or token.",
            default=0.8,
        ),
        Argument(
            name="--seed",
            metavar="N",
            kind=COUNT,
            help="The seed of the sampling: another seed gives another text.",
            default=0,
        ),
        Argument(
            name="--data",
            metavar="PATH",
            kind=LOCATION,
            help="Label all rows of tables with a column of images: Parquet files, as `data prepare` writes "
            "them, data sets of Lance, tar shards and others; s3://bucket/prefix, too. With --trust-code: "
            "files for a recipe of your own, which are a table unless the recipe has open_samples.",
        ),
        Argument(
            name="--split",
            metavar="train|valid",
            kind=one_of("train", "valid"),
            help="Predict the samples of a split of the run's data set with the recipe's method predict.",
        ),
        Argument(
            name="--out",
            metavar="PATH",
            kind=LOCATION,
            help="The folder or s3:// URL for the predictions of --data; or the .parquet or .jsonl file for "
            "those of --split and of a recipe of your own, and for the answers to a FILE of prompts.",
        ),
        Argument(
            name="--image-column",
            metavar="NAME",
            help="The column of --data that holds the images.",
            default="image",
        ),
        Argument(
            name="--label-column",
            metavar="NAME",
            help="The column of --data, or of a FILE of prompts, that predictions are compared with.",
            default_text="label, or answer with prompts, if there is such a column",
        ),
        Argument(
            name="--top",
            metavar="K",
            kind=POSITIVE,
            help="The number of labels per image, most likely first.",
            default=1,
        ),
        GRID,
        CHECKPOINT,
        TRUST_CODE,
        Argument(
            name="--batch-size",
            metavar="N",
            kind=POSITIVE,
            help="The number of images, samples or prompts that the model gets at once.",
            default=64,
        ),
        STORAGE,
        ENDPOINT,
        JSON,
    ),
    problem=_predict_problem,
)
