"""The file with the JSON Schema of a recipe's settings, which lies in the folder of the user's code.

`trainyard recipe schema` writes it. With it the launcher checks `train.model` of a run with the user's own
recipe, without importing the recipe and without PyTorch.
"""

from __future__ import annotations


def schema_file(recipe: str) -> str:
    """Return the path of the schema file in the folder of the code for `module:Class`.

    >>> schema_file("vision.models:Segmenter")
    'vision/models.Segmenter.schema.json'
    """
    module, _, name = recipe.partition(":")
    return f"{module.replace('.', '/')}.{name}.schema.json"
