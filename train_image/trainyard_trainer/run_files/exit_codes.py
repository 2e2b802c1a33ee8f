"""The exit codes of `trainyard` and of the trainer's programs."""

from __future__ import annotations

SUCCEEDED = 0

FAILED = 1
"""The run failed or was stopped, or a check found something."""

WRONG_INPUT = 2
"""The run file, an option or an argument is wrong: a retry changes nothing."""

CLUSTER_REFUSED = 3
"""The cluster refused a request or cannot be reached."""

NOT_FOUND = 4
"""`trainyard_trainer.tools.folder` was asked for a file or a run that does not exist."""

TIMED_OUT = 124
"""The run has not ended within `--timeout` of `submit` or `watch`; it goes on. `timeout` of coreutils has the
same code."""

OUTPUT_CLOSED = 141
"""The reader of standard output is gone, as in `trainyard list | head -1`; SIGPIPE has the same code."""

DETACHED = 130
"""Ctrl-C ended the program; a run on a cluster goes on."""
