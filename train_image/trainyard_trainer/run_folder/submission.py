"""Write what was submitted into the run's folder, so that the launcher can render it again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from trainyard_trainer.config.trainer_config import CONFIG_VARIABLE
from trainyard_trainer.run_files.names import CODE, SUBMISSION

if TYPE_CHECKING:
    pass
from trainyard_trainer.run_files.submission import VARIABLE, code_file


class Folder(Protocol):
    """What is needed of a run's folder."""

    root: str

    def write(self, path: str, data: bytes | str) -> None: ...
    def delete(self, path: str) -> None: ...
    def file_names(self, path: str) -> list[str]: ...


def record_submission(
    folder: Folder, code_sha256: str | None, environment: Mapping[str, str] = os.environ
) -> None:
    """Put it into the run's folder, and remove the code of earlier ones. Where nothing was submitted, as on
    a laptop, none is left there."""
    for name in folder.file_names(f"{folder.root}/{CODE}"):
        if code_sha256 is None or f"{CODE}/{name}" != code_file(code_sha256):
            folder.delete(f"{folder.root}/{CODE}/{name}")
    path = f"{folder.root}/{SUBMISSION}"
    if VARIABLE not in environment:
        folder.delete(path)
        return
    submitted = {"config": json.loads(environment[CONFIG_VARIABLE])}
    submitted |= json.loads(environment[VARIABLE])
    folder.write(path, json.dumps(submitted, indent=2))
