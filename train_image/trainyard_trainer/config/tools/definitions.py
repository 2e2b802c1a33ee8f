"""The arguments of the command-line tools: one definition for the launcher's commands and for the tools.

`trainyard predict`, `trainyard data` and `trainyard checkpoints` run a tool of the trainer. The launcher
builds its commands from these tables, so that help and errors need neither torch nor Ray; each tool builds
its own parser from the same table (`trainyard_trainer.tools.command_line.parse`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trainyard_trainer.config.data.sources import describe_preparable_sources
from trainyard_trainer.config.location import local_problem
from trainyard_trainer.config.tools.arguments import (
    ADDRESS,
    AT_LEAST_THREE,
    AT_LEAST_TWO,
    COUNT,
    LOCAL,
    LOCATION,
    MODEL,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    VOCABULARY,
    Argument,
    Tool,
    one_of,
)

# Arguments that several tools have.

RUN = Argument(
    name="run",
    metavar="RUN",
    kind=LOCATION,
    help="The run's name, or its folder's path with a slash in it.",
    is_required=True,
)
STORAGE = Argument(
    name="--storage",
    metavar="DIR",
    kind=LOCATION,
    help="The folder, or s3://bucket/prefix, that holds the folders of runs.",
    default="runs",
)
ENDPOINT = Argument(
    name="--endpoint",
    metavar="URL",
    kind=ADDRESS,
    help="The address of an S3 server other than AWS.",
)
CHECKPOINT = Argument(
    name="--checkpoint",
    metavar="NAME",
    help="The weights: `delivered` (the run's model.pt), `last`, `best`, or the name of a checkpoint.",
    default="delivered",
)
TRUST_CODE = Argument(
    name="--trust-code",
    kind=None,
    help="Run the code of the user's recipe from the run's folder. Anyone who may write there can change it.",
)
JSON = Argument(name="--json", kind=None, help="Print JSON instead of a table.")
GRID = Argument(
    name="--grid",
    metavar="FILE.png",
    kind=LOCAL,
    help="Also draw images with their labels to this file.",
)
SOURCE = Argument(
    name="source",
    metavar="SOURCE",
    kind=LOCATION,
    help=describe_preparable_sources(),
    is_required=True,
)
IMAGE_COLUMN = Argument(
    name="--image-column",
    metavar="NAME",
    help="The column of the images: paths in a manifest, bytes or pixels in Parquet.",
    default="image",
)
LABEL_COLUMN = Argument(
    name="--label-column",
    metavar="NAME",
    help="The column of the labels: numbers from 0, or names.",
    default="label",
)

# Checkpoints of a run.

CHECKPOINTS_LS = Tool(
    module="checkpoints",
    command="ls",
    help="List the checkpoints of a run, newest first, as their manifests describe them.",
    arguments=(RUN, STORAGE, ENDPOINT, JSON),
)
CHECKPOINTS_VERIFY = Tool(
    module="checkpoints",
    command="verify",
    help="Read all checkpoints of a run and compare their SHA-256; exit code 1 if one is damaged.",
    arguments=(RUN, STORAGE, ENDPOINT, JSON),
)
CHECKPOINTS_PRUNE = Tool(
    module="checkpoints",
    command="prune",
    help="Delete older and damaged checkpoints of a run that is not being trained.",
    arguments=(
        RUN,
        Argument(
            name="--keep",
            metavar="N",
            kind=POSITIVE,
            help="The number of intact checkpoints that stay, newest first.",
            is_required=True,
        ),
        Argument(
            name="--keep-best",
            kind=None,
            help="Also keep the checkpoint with the best validation result.",
        ),
        Argument(
            name="--keep-every-epochs",
            metavar="K",
            kind=POSITIVE,
            help="Also keep one checkpoint for each K epochs, as `checkpoint.keep_every_epochs` does.",
        ),
        Argument(name="--dry-run", kind=None, help="Print what would be deleted; delete nothing."),
        STORAGE,
        ENDPOINT,
    ),
)
EXPORT_FORMATS = ("state_dict", "torchscript", "pt2", "onnx", "huggingface")


def _export_problem(given: Mapping[str, Any]) -> str | None:
    """Return which arguments of `checkpoints export` exclude each other."""
    if given.get("merge") and given.get("format", "huggingface") != "huggingface":
        return f"--merge and --format {given['format']} exclude each other: leave one out"
    return None


BASE_MODEL = Argument(
    name="--base-model",
    metavar="DIR",
    kind=LOCAL,
    help="The folder of the model that a run of causal_lm started from, if it lies elsewhere here.",
)
CHECKPOINTS_EXPORT = Tool(
    module="export",
    help="Write a model to a file, and its classes and the preparation of images to FILE.json.",
    arguments=(
        RUN,
        Argument(
            name="--out",
            metavar="FILE",
            kind=LOCATION,
            help="The file or s3:// URL to write; with `huggingface` a folder.",
            default_text="in the run's folder, below export/",
        ),
        Argument(
            name="--format",
            metavar="|".join(EXPORT_FORMATS),
            kind=one_of(*EXPORT_FORMATS),
            help="`state_dict` for torch.load, `torchscript` for torch.jit.load, `pt2` for "
            "torch.export.load, `onnx` for other programs, `huggingface` for Transformers and PEFT.",
            default_text="state_dict; huggingface for runs of causal_lm",
        ),
        Argument(
            name="--merge",
            kind=None,
            help="Merge the adapter of a run of causal_lm into its model, and write all weights.",
        ),
        BASE_MODEL,
        CHECKPOINT,
        TRUST_CODE,
        STORAGE,
        ENDPOINT,
    ),
    problem=_export_problem,
)

# Data sets.

ENCODINGS = ("auto", "raw", "encoded")

RECIPES_OF_TOKENS = ("causal_lm", "language_model")
"""The recipes that train on the tokens of a tokenizer."""

_OF_IMAGES = ("size", "channels", "encoding", "image_column", "label_column")
_OF_ROWS = ("padding", "loss_on", "too_long", "max_bad_samples")
_OF_TOKENS = ("recipe", "context_length", "padding", "loss_on", "too_long", "text_files")


def _prepare_problem(given: Mapping[str, Any]) -> str | None:
    """Return which arguments of `data prepare` exclude or need each other."""
    if "tokenizer" not in given:
        needing = [key for key in _OF_TOKENS if key in given]
        return f"{_option(needing[0])} needs --tokenizer" if needing else None
    for key in ("recipe", "context_length"):
        if key not in given:
            return f"--tokenizer needs {_option(key)}: {_NEEDED[key]}"
    excluded = dict(zip(RECIPES_OF_TOKENS, (("text_files",), _OF_ROWS), strict=True))
    for key in _OF_IMAGES:
        if key in given:
            return f"{_option(key)} and --tokenizer exclude each other: leave one out"
    for key in excluded[given["recipe"]]:
        if key in given:
            return (
                f"{_option(key)} and --recipe {given['recipe']} exclude each other: leave one out"
            )
    return None


_NEEDED = {
    "recipe": "causal_lm for rows of chats, prompts or text, or language_model for one stream of text",
    "context_length": "the number of tokens that a sample of the run has",
}
"""What a missing option stands for."""


def _option(key: str) -> str:
    return f"--{key.replace('_', '-')}"


DATA_PREPARE = Tool(
    module="data",
    command="prepare",
    help="Convert images, or text by a tokenizer, to shuffled, split and checked Parquet files; the same "
    "command resumes.",
    arguments=(
        SOURCE,
        Argument(
            name="dest",
            metavar="DEST",
            kind=LOCATION,
            help="The folder or s3://bucket/prefix to write.",
            is_required=True,
        ),
        Argument(
            name="--valid",
            metavar="SOURCE",
            kind=LOCATION,
            help="A source of validation samples.",
            default_text="a share of SOURCE",
        ),
        Argument(
            name="--valid-share",
            metavar="SHARE",
            kind=SHARE,
            help="The share of each class, of rows or of text that is taken for validation, if SOURCE has no "
            "validation part.",
            default=0.2,
        ),
        Argument(
            name="--size",
            metavar="PIXELS",
            kind=POSITIVE,
            help="The height and width of all images: each is cropped to its centre and resized.",
            default_text="the source's, if all images have the same",
        ),
        Argument(
            name="--channels",
            metavar="1|3",
            kind=one_of(1, 3),
            help="1 for grey images, 3 for colour.",
            default_text="as in the source",
        ),
        Argument(
            name="--encoding",
            metavar="|".join(ENCODINGS),
            kind=one_of(*ENCODINGS),
            help="`raw` stores pixels, which train fastest. `encoded` stores image files, which are smaller "
            "and are decoded during training. `auto` chooses by the size of the images.",
            default="auto",
        ),
        IMAGE_COLUMN,
        LABEL_COLUMN,
        Argument(
            name="--tokenizer",
            metavar="DIR",
            kind=MODEL,
            help="The folder of a tokenizer or of a model, s3://bucket/prefix or hf://org/name. SOURCE is "
            "text or chats; DEST gets their tokens.",
        ),
        Argument(
            name="--recipe",
            metavar="|".join(RECIPES_OF_TOKENS),
            kind=one_of(*RECIPES_OF_TOKENS),
            help="The recipe that trains on the tokens: causal_lm on rows of chats, prompts or text, "
            "language_model on one stream of text.",
        ),
        Argument(
            name="--context-length",
            metavar="N",
            kind=AT_LEAST_TWO,
            help="The context length of the run in tokens.",
        ),
        Argument(
            name="--padding",
            kind=None,
            help="Make a sample of each row, with padding behind it, as for `train.packing: false`.",
        ),
        Argument(
            name="--loss-on",
            metavar="answers|all",
            kind=one_of("answers", "all"),
            help="The tokens of chats and prompts that are learnt, as `train.loss_on`.",
            default="answers",
        ),
        Argument(
            name="--too-long",
            metavar="truncate|split|refuse",
            kind=one_of("truncate", "split", "refuse"),
            help="What becomes of rows above the context length, as `train.too_long`.",
            default="truncate",
        ),
        Argument(
            name="--text-files",
            metavar="PATTERN",
            help="The names of the text files of a folder, such as '*.md', as `data.text_files`.",
            default_text="*.txt",
        ),
        Argument(
            name="--max-bad-samples",
            metavar="N",
            kind=COUNT,
            help="The number of unreadable samples that may be left out.",
            default=0,
        ),
        Argument(
            name="--seed",
            metavar="N",
            kind=COUNT,
            help="The seed of the split and of the order.",
            default=0,
        ),
        ENDPOINT,
        Argument(
            name="--dest-endpoint",
            metavar="URL",
            kind=ADDRESS,
            help="The S3 server of DEST.",
            default_text="--endpoint",
        ),
        Argument(
            name="--jobs",
            metavar="N",
            kind=POSITIVE,
            help="The number of threads that read and decode images, or of processes that tokenise.",
            default_text="one per CPU, and at most 8 that tokenise",
        ),
    ),
    problem=_prepare_problem,
)
DATA_INSPECT = Tool(
    module="data",
    command="inspect",
    help="Show the images and classes of a data set, the columns of a table, or the tokens of prepared text.",
    arguments=(
        Argument(
            name="source",
            metavar="SOURCE",
            kind=LOCATION,
            help="Images as `data prepare` takes them, a data set that it has written, prepared text of a "
            "run, or a table as recipes of your own take it.",
            is_required=True,
        ),
        Argument(
            name="--table",
            kind=None,
            help="Show the columns, also of a table with images.",
        ),
        GRID,
        IMAGE_COLUMN,
        LABEL_COLUMN,
        ENDPOINT,
        JSON,
    ),
)

DATA_TOKENIZER = Tool(
    module="data",
    command="tokenizer",
    help="Train a byte-level BPE tokenizer on text, for `train.model.tokenizer` and Transformers.",
    arguments=(
        Argument(
            name="source",
            metavar="SOURCE",
            kind=LOCATION,
            help="A text file, a folder of text files, `stdlib`, or JSON lines, JSON or Parquet files whose "
            "rows have `text`; s3:// URLs, too.",
            is_required=True,
        ),
        Argument(
            name="--vocab-size",
            metavar="N",
            kind=VOCABULARY,
            help="The number of tokens: 256 bytes, `<|endoftext|>`, `<|pad|>`, and those that are learnt.",
            is_required=True,
        ),
        Argument(
            name="--out",
            metavar="DIR",
            kind=LOCAL,
            help="The new folder to write, which AutoTokenizer of Transformers reads.",
            is_required=True,
        ),
        Argument(
            name="--text-files",
            metavar="PATTERN",
            help="The names of the text files of a folder, such as '*.md'.",
            default_text="*.txt",
        ),
        ENDPOINT,
    ),
)

# Predictions.

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
            "predict has no input. Name image files, or give Parquet files with --data PATH and --out PATH, "
            "or give a language model its --prompt TEXT, a FILE of prompts with --out FILE, or --chat with "
            "it, or for your own recipe name a --split of its data, or --data PATH with --trust-code"
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
    wrong = [_option(key) for key in _EXCLUDED[what] if given.get(key)]
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
            help="Label all rows of Parquet files, as `data prepare` writes them or with a column of images; "
            "s3://bucket/prefix, too. With --trust-code: files for a recipe of your own, which are "
            "a table unless the recipe has open_samples.",
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

# The comparison of two runs.

PLOT = Argument(
    name="--plot",
    metavar="FILE.png",
    kind=LOCAL,
    help="Also draw the loss and the validation metrics of both runs to this file.",
)
COMPARE = Tool(
    module="compare",
    help="Show what differs between two runs: config, results, speed, failures, versions, memory.",
    arguments=(
        Argument(
            name="a",
            metavar="RUN",
            kind=LOCATION,
            help="The first run: its name, or its folder's path with a slash in it.",
            is_required=True,
        ),
        Argument(
            name="b",
            metavar="RUN",
            kind=LOCATION,
            help="The second run: its name, or its folder's path with a slash in it.",
            is_required=True,
        ),
        STORAGE,
        ENDPOINT,
        PLOT,
        JSON,
    ),
)

# The user's own recipes.

RECIPE_SCHEMA = Tool(
    module="recipe_schema",
    help="Write the JSON Schema of a recipe's settings beside its code.",
    arguments=(
        Argument(
            name="code",
            metavar="CODE",
            kind=LOCAL,
            help="The folder of the user's code.",
            is_required=True,
        ),
        Argument(
            name="recipe",
            metavar="RECIPE",
            help="The class of the recipe as module:Class.",
            is_required=True,
        ),
    ),
)

STEPS = Argument(
    name="--steps",
    metavar="N",
    kind=AT_LEAST_THREE,
    help="The number of steps of each trial, of up to 8 samples; at least 3.",
    default=6,
)
VERIFY = Tool(
    module="verify",
    help="Check that a recipe trains the same bits after a kill, and the same with any number of workers.",
    arguments=(STEPS, JSON),
)
