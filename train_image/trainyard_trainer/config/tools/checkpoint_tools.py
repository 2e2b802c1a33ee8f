"""The tools `checkpoints ls`, `verify`, `prune` and `export`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard_trainer.config.tools.arguments import (
    LOCATION,
    POSITIVE,
    Argument,
    Tool,
    one_of,
)
from trainyard_trainer.config.tools.shared_arguments import (
    BASE_MODEL,
    CHECKPOINT,
    ENDPOINT,
    JSON,
    RUN,
    STORAGE,
    TRUST_CODE,
)

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
