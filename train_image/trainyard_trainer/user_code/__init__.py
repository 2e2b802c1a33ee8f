"""Runs of the user's own code: `command`, `function`, torchrun, and the archive that carries the code."""
