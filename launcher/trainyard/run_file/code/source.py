"""The git revision from which a run is submitted or trained."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from trainyard.run_file.models import RunConfig, RunWithCode
from trainyard_trainer.config.section import Section

GIT_S = 10.0
"""For how many seconds git may look at the files of a folder."""


class GitState(Section):
    """The state of a folder in git. It describes a run, and is no part of its identity.

    Its JSON is the text of the environment variable that carries it to the driver.
    """

    revision: str
    """The commit that is checked out."""

    is_dirty: bool
    """Whether files of the folder differ from that commit, or are not in it."""


def source_of(run: RunConfig, run_file: Path | None = None) -> GitState | None:
    """Return the git state of the folder of a run's code, else of its run file or the current folder."""
    if isinstance(run, RunWithCode) and run.code is not None:
        return git_state(Path(run.code))
    return git_state(Path.cwd() if run_file is None else run_file.resolve().parent)


def git_state(folder: Path) -> GitState | None:
    """Return the git state of a folder; None if it is in no commit, or git cannot tell."""
    revision = _git(folder, "rev-parse", "--verify", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=normal", "--", ".")
    if not revision or changes is None:
        return None
    return GitState(revision=revision.strip(), is_dirty=bool(changes))


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command that changes nothing; None if it fails or takes too long."""
    if (git := shutil.which("git")) is None:
        return None
    # Neither a lock in the repository nor a program that its settings name.
    command = [git, "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", f"{folder}"]
    try:
        ended = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, errors="replace", timeout=GIT_S
        )
    except subprocess.TimeoutExpired:
        return None
    return ended.stdout if ended.returncode == 0 else None
