"""Record the submission in the run's folder, so that `trainyard reproduce` can render the same RayJob."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from trainyard_trainer.config.trainer_config import CONFIG_VARIABLE
from trainyard_trainer.run_files.names import CODE, SUBMISSION
from trainyard_trainer.run_files.submission import SOURCE_VARIABLE, VARIABLE, code_file
from trainyard_trainer.run_folder.folder import RunFolder


def record_submission(
    folder: RunFolder, code_sha256: str | None, environment: Mapping[str, str] = os.environ
) -> None:
    """Write the submission to the run's folder, and delete the code archives of earlier submissions.

    A run that was not submitted, as on a laptop, has no such file: that of an earlier one is deleted.
    """
    for name in folder.file_names(f"{folder.root}/{CODE}"):
        if code_sha256 is None or f"{CODE}/{name}" != code_file(code_sha256):
            folder.delete(f"{folder.root}/{CODE}/{name}")
    path = f"{folder.root}/{SUBMISSION}"
    if VARIABLE not in environment:
        folder.delete(path)
        return
    submitted = {"config": json.loads(environment[CONFIG_VARIABLE])}
    submitted |= json.loads(environment[VARIABLE])
    if source := environment.get(SOURCE_VARIABLE):
        submitted["git"] = json.loads(source)
    folder.write(path, json.dumps(submitted, indent=2))
