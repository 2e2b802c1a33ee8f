"""The arguments of the command-line tools: one definition for the launcher's commands and for the tools.

`trainyard predict`, `trainyard data` and `trainyard checkpoints` run a tool of the trainer. The launcher
builds its commands from these tables, so that help and errors need neither torch nor Ray; each tool builds
its own parser from the same table (`trainyard_trainer.tools.command_line.parse`).
"""
