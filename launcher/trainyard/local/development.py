"""Train a run, and start it again whenever its run file or its code changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from trainyard.errors import LauncherError
from trainyard.local.file_changes import FilesChanged, watching
from trainyard.run_file.code.code_archive import Overlay
from trainyard.run_file.models import RunConfig, RunWithCode
from trainyard_trainer.config.trainer_config import AttemptConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunVersion:
    """A run as its files are at one moment. Two are equal if they would train the same."""

    run: RunConfig = field(compare=False)
    config: AttemptConfig
    code: Overlay | None

    @property
    def code_folder(self) -> Path | None:
        """The folder of the run's code; None if it has none."""
        if isinstance(self.run, RunWithCode) and self.run.code is not None:
            return Path(self.run.code)
        return None


def develop(
    run_file: Path,
    storage: Path,
    load: Callable[[], RunVersion],
    train: Callable[[RunVersion], None],
    say: Callable[[str], None],
) -> NoReturn:
    """Train the run that `load` returns, and again whenever that changes, for ever.

    Raises LauncherError if the first version is wrong. A later error is said, and the next change awaited.
    """
    found: RunVersion | str = load()
    folder: Path | None = None
    while True:
        known = found
        folder = known.code_folder if isinstance(known, RunVersion) else folder
        with watching(run_file, folder, storage, _differs(load, known)) as changes:
            if isinstance(known, RunVersion):
                try:
                    with changes.interrupting():
                        train(known)
                except FilesChanged:
                    say("the run file or its code has changed: the run ends and starts again")
                except LauncherError as error:
                    say(str(error))
            else:
                say(known)
            if not changes.have_come:
                say("waiting for a change of the run file or of its code; Ctrl-C ends")
            changes.wait()
        found = _load(load)


def _differs(load: Callable[[], RunVersion], known: RunVersion | str) -> Callable[[], bool]:
    """Return a function that returns whether `load` has another result than the known one."""
    return lambda: _load(load) != known


def _load(load: Callable[[], RunVersion]) -> RunVersion | str:
    """Return what `load` returns, or the text of its error."""
    try:
        return load()
    except LauncherError as error:
        return str(error)
