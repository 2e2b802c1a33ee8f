"""Start the process of a pod from which the fork servers of its jobs are forked, and print what it tells."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainyard_trainer.on_ray.local_ray.forked_workers import ForkingProcess, print_refusals

PROGRAM = str(Path(__file__).with_name("fork_template.py"))


class TemplateProcess(ForkingProcess):
    """The process that forks a fork server for each job."""

    def __init__(self, first: Sequence[str], agent_port: int) -> None:
        """`first` are the fork servers that will be needed first: the ids of jobs, or that of drivers.

        `agent_port` is the port of Ray's agent in this pod, which is open when the pod is ready.
        """
        super().__init__(PROGRAM, (str(agent_port), *first), os.environ)

    def print_causes(self) -> None:
        """Print why workers are not forked, each cause once, until the process has ended."""
        print_refusals(self.refusals())
        print(
            f"the process that forks workers has ended: exit code {self.process.wait()}", flush=True
        )
