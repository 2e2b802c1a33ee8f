"""Arguments that several command-line tools have."""

from __future__ import annotations

from trainyard_trainer.config.data.sources import describe_preparable_sources
from trainyard_trainer.config.tools.arguments import ADDRESS, LOCAL, LOCATION, Argument

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
BASE_MODEL = Argument(
    name="--base-model",
    metavar="DIR",
    kind=LOCAL,
    help="The folder of the model that a run of causal_lm started from, if it lies elsewhere here.",
)
