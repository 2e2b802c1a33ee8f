"""The options with which a command line reaches a cluster and a namespace, for commands to copy."""

from __future__ import annotations

import shlex


def command_options(namespace: str, context: str | None) -> str:
    """Return `-n NAMESPACE`, and `--context CONTEXT` if a context was chosen, quoted for a shell.

    `trainyard` and `kubectl` know both options.
    """
    return f"-n {namespace}" + ("" if context is None else f" --context {shlex.quote(context)}")
