"""One attempt at a run of a built-in recipe, from its config to its summary, whoever starts the workers.

`on_ray` and `boosting` build on this room.
"""
