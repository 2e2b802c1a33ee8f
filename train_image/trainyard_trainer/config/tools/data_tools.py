"""The tools `data prepare`, `inspect` and `tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard_trainer.config.tools.arguments import (
    ADDRESS,
    AT_LEAST_TWO,
    COUNT,
    LOCAL,
    LOCATION,
    MODEL,
    POSITIVE,
    SHARE,
    VOCABULARY,
    Argument,
    Tool,
    one_of,
    option_of,
)
from trainyard_trainer.config.tools.shared_arguments import (
    ENDPOINT,
    GRID,
    IMAGE_COLUMN,
    JSON,
    LABEL_COLUMN,
    SOURCE,
)

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
        return f"{option_of(needing[0])} needs --tokenizer" if needing else None
    for key in ("recipe", "context_length"):
        if key not in given:
            return f"--tokenizer needs {option_of(key)}: {_NEEDED[key]}"
    excluded = dict(zip(RECIPES_OF_TOKENS, (("text_files",), _OF_ROWS), strict=True))
    for key in _OF_IMAGES:
        if key in given:
            return f"{option_of(key)} and --tokenizer exclude each other: leave one out"
    for key in excluded[given["recipe"]]:
        if key in given:
            return (
                f"{option_of(key)} and --recipe {given['recipe']} exclude each other: leave one out"
            )
    return None


_NEEDED = {
    "recipe": "causal_lm for rows of chats, prompts or text, or language_model for one stream of text",
    "context_length": "the number of tokens that a sample of the run has",
}
"""What a missing option stands for."""


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
