"""The arguments of the command-line tools: one definition for the launcher's commands and for the tools.

`trainyard predict`, `trainyard data` and `trainyard checkpoints` run a tool of the trainer. The launcher
builds its commands from these tables, so that help and errors need neither torch nor Ray; each tool builds
its own parser from the same table (`trainyard_trainer.tools.command_line.parse`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainyard_trainer.config.data_sources import describe_preparable_sources
from trainyard_trainer.config.location import endpoint_problem, local_problem, location_problem


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueKind:
    """A kind of value: how its text is read, and which values are accepted."""

    read: Callable[[str], Any]
    rule: str
    """The accepted values in words, as an error message names them."""
    accepts: Callable[[Any], bool] = lambda _: True
    problem: Callable[[str], str | None] = lambda _: None
    """Takes the text. Returns what is wrong with it, where `rule` alone would not say it."""

    def parse(self, text: str) -> Any:
        """Return the value of a text. Raises ValueError with a message for the user."""
        if (problem := self.problem(text)) is not None:
            raise ValueError(f"{text} {problem}")
        try:
            value = self.read(text)
            is_accepted = self.accepts(value)
        except ValueError:
            is_accepted = False
        if not is_accepted:
            raise ValueError(f"{text} is not {self.rule}")
        return value


TEXT = ValueKind(read=str, rule="a text")

LOCATION = ValueKind(read=str, rule="a path or s3://bucket/prefix", problem=location_problem)
LOCAL = ValueKind(read=str, rule="a path of this machine", problem=local_problem)
ADDRESS = ValueKind(read=str, rule="an address", problem=endpoint_problem)
COUNT = ValueKind(read=int, rule="a whole number of at least 0", accepts=lambda value: value >= 0)
POSITIVE = ValueKind(
    read=int, rule="a whole number of at least 1", accepts=lambda value: value >= 1
)
NOT_NEGATIVE = ValueKind(
    read=float, rule="a number of at least 0", accepts=lambda value: 0 <= value < math.inf
)
SHARE = ValueKind(read=float, rule="a number between 0 and 1", accepts=lambda value: 0 < value < 1)


def one_of(*choices: str | int) -> ValueKind:
    """Return the kind of value that is one of these texts or whole numbers."""
    kind = type(choices[0])
    return ValueKind(
        read=kind,
        rule=f"one of {', '.join(map(str, choices))}",
        accepts=lambda value: value in choices,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One argument of a tool: an option if its name begins with `--`, else a positional argument."""

    name: str
    help: str
    metavar: str = ""
    """The name that help texts show for the value."""
    kind: ValueKind | None = TEXT
    """The kind of the value; None for a flag, which has no value."""
    default: Any = None
    """The value of an argument that was not given. A flag that was not given is False."""
    default_text: str | None = None
    """The default as help texts describe it, where it is not a constant."""
    is_required: bool = False
    is_repeated: bool = False
    """Whether a positional argument takes any number of values."""

    @property
    def key(self) -> str:
        """The argument's name as a Python identifier."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def is_option(self) -> bool:
        """Whether it is an option, and not a positional argument."""
        return self.name.startswith("--")

    @property
    def full_help(self) -> str:
        """The help text, with the default at its end."""
        default = self.default_text or self.default
        return self.help if default is None else f"{self.help}  [default: {default}]"


def _without_problem(given: Mapping[str, Any]) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """One command of a tool: `python -m trainyard_trainer.tools.<module> [<command>] ARGUMENT...`."""

    module: str
    command: str | None = None
    help: str
    """What the command does, in a sentence."""
    arguments: tuple[Argument, ...]
    problem: Callable[[Mapping[str, Any]], str | None] = _without_problem
    """Takes the given arguments by key. Returns what is wrong with their combination, or None."""


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
EXPORT_FORMATS = ("state_dict", "torchscript", "pt2", "onnx")
CHECKPOINTS_EXPORT = Tool(
    module="export",
    help="Write a model to a file, and its classes and the preparation of images to FILE.json.",
    arguments=(
        RUN,
        Argument(
            name="--out",
            metavar="FILE",
            kind=LOCATION,
            help="The file or s3:// URL to write.",
            default_text="a file in the run's folder, below export/",
        ),
        Argument(
            name="--format",
            metavar="|".join(EXPORT_FORMATS),
            kind=one_of(*EXPORT_FORMATS),
            help="`state_dict` for torch.load, `torchscript` for torch.jit.load, `pt2` for "
            "torch.export.load, `onnx` for other programs.",
            default="state_dict",
        ),
        CHECKPOINT,
        STORAGE,
        ENDPOINT,
    ),
)

# Data sets.

ENCODINGS = ("auto", "raw", "encoded")
DATA_PREPARE = Tool(
    module="data",
    command="prepare",
    help="Convert images to shuffled, split and checked Parquet files; the same command resumes.",
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
            help="A source of validation images.",
            default_text="a share of SOURCE",
        ),
        Argument(
            name="--valid-share",
            metavar="SHARE",
            kind=SHARE,
            help="The share of each class that is taken for validation, if SOURCE has no validation part.",
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
            help="The number of threads that read and decode.",
            default_text="one per CPU",
        ),
    ),
)
DATA_INSPECT = Tool(
    module="data",
    command="inspect",
    help="Show counts, classes, shapes and bytes of a data set.",
    arguments=(
        Argument(
            name="source",
            metavar="SOURCE",
            kind=LOCATION,
            help="A source as `data prepare` takes it, or a data set that it has written.",
            is_required=True,
        ),
        GRID,
        IMAGE_COLUMN,
        LABEL_COLUMN,
        ENDPOINT,
        JSON,
    ),
)

# Predictions.

_OF_TEXT = ("length", "temperature", "seed")
_OF_DATA = ("image_column", "label_column")


def _predict_problem(given: Mapping[str, Any]) -> str | None:
    """Return which arguments of `predict` exclude or need each other."""
    inputs = [key for key in ("images", "prompt", "data") if key in given]
    if ("data" in given) != ("out" in given):
        return "--data PATH and --out PATH belong together: the rows to read, and the predictions to write"
    if not inputs:
        return (
            "predict has no input. Name image files, or give Parquet files with --data PATH and --out PATH, "
            "or give a language model its --prompt TEXT"
        )
    if len(inputs) > 1:
        names = {"images": "IMAGE", "prompt": "--prompt", "data": "--data"}
        return f"{names[inputs[0]]} and {names[inputs[1]]} exclude each other: leave one out"
    (what,) = inputs
    excluded = {
        "images": (*_OF_TEXT, *_OF_DATA),
        "prompt": (*_OF_DATA, "grid", "top", "batch_size"),
        "data": (*_OF_TEXT, "grid"),
    }[what]
    wrong = [f"--{key.replace('_', '-')}" for key in excluded if key in given]
    if wrong:
        what_is_given = {"images": "IMAGE", "prompt": "--prompt", "data": "--data"}[what]
        return f"{what_is_given} and {wrong[0]} exclude each other: leave one out"
    return None


PREDICT_DATA = Argument(
    name="--data",
    metavar="PATH",
    kind=LOCATION,
    help="Label all rows of Parquet files, as `data prepare` writes them or with a column of images; "
    "s3://bucket/prefix, too.",
)
PREDICT = Tool(
    module="predict",
    help="Print the labels and confidences that a run's model gives to images; or continue a text.",
    arguments=(
        RUN,
        Argument(
            name="images",
            metavar="IMAGE",
            kind=LOCAL,
            help="Image files, such as PNG or JPEG.",
            is_repeated=True,
        ),
        Argument(name="--prompt", metavar="TEXT", help="The text that a language model continues."),
        Argument(
            name="--length",
            metavar="N",
            kind=POSITIVE,
            help="The largest number of bytes of the continuation.",
            default=200,
        ),
        Argument(
            name="--temperature",
            metavar="T",
            kind=NOT_NEGATIVE,
            help="The sampling temperature; 0 always takes the most likely byte.",
            default=0.8,
        ),
        Argument(
            name="--seed",
            metavar="N",
            kind=COUNT,
            help="The seed of the sampling: another seed gives another text.",
            default=0,
        ),
        PREDICT_DATA,
        Argument(
            name="--out",
            metavar="PATH",
            kind=LOCATION,
            help="The folder or s3:// URL for the predictions of --data.",
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
            help="The column of --data that predictions are compared with.",
            default_text="label, if there is such a column",
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
        Argument(
            name="--batch-size",
            metavar="N",
            kind=POSITIVE,
            help="The number of images that the model gets at once.",
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
