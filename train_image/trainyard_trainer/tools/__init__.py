"""Command-line tools in the image and on a laptop: data, checkpoints, export, predict, compare, verify.

A tool is a module of this folder with the name of its command, and `command_line` is what all of them share.
The larger tools keep their work in folders: `prediction/` for `predict`, `verification/` for `verify`.
`pods/` has the programs that pods of the platform run.
Nothing imports this room; the launcher starts its modules as programs.
"""
