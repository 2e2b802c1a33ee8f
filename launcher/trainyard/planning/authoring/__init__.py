"""Files that help to write a run.

`init` writes a new run file, and `new_recipe` the skeleton of a recipe with its test. `schema` writes the
JSON Schemas by which an editor completes and checks run files and platform files.
"""
