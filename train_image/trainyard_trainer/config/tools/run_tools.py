"""Tools that compare two runs, verify a recipe, and write the schema of a recipe."""

from __future__ import annotations

from trainyard_trainer.config.tools.arguments import AT_LEAST_THREE, LOCAL, LOCATION, Argument, Tool
from trainyard_trainer.config.tools.shared_arguments import ENDPOINT, JSON, STORAGE

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
