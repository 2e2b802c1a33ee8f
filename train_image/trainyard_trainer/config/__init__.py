"""The config of a run: the sections of a run file that the trainer reads, one module for each section.

`trainer_config` puts the sections together, `training/` has the section `train`, and `data/` the section
`data`. `memory/` estimates whether a model fits the GPUs. `tools/` has the arguments of the command-line
tools. The launcher imports this room, so it needs only the standard library and pydantic.
"""
