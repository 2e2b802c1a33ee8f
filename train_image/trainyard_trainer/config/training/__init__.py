"""The section `train` of a run file: what is trained, and how.

`recipes` is the registry of the recipes. `train`, `boosting` and `own_recipe` have the keys of each recipe;
`models`, `optimizers`, `strategies` and `metric` have the parts that these share. `batch_share` divides the
global batch over the workers, and `identity` says which keys decide the weights.
"""
