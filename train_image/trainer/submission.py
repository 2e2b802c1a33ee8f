"""What was submitted, as it lies in the run's folder: with it the launcher renders the same once more.

The launcher reads this module, too, and so it needs no more than the config does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Protocol

from trainer.config import CONFIG_VARIABLE

VARIABLE = "TRAINYARD_SUBMISSION"
"""The environment variable of the head that tells what the config does not: image, pools, queue, network,
and the hash of each part of the RayJob."""

FILE = "submission.json"
"""Both together, in the run's folder."""

CODE_FILE = "code.tar.gz"
"""The code that travelled with it, in the run's folder."""


class Folder(Protocol):
    """What is needed of a run's folder."""

    root: str

    def write(self, path: str, data: bytes | str) -> None: ...
    def delete(self, path: str) -> None: ...


def keep(folder: Folder, environment: Mapping[str, str] = os.environ) -> None:
    """Put it into the run's folder. Where nothing was submitted, as on a laptop, none is left there."""
    path = f"{folder.root}/{FILE}"
    if VARIABLE not in environment:
        folder.delete(path)
        return
    submitted = {"config": json.loads(environment[CONFIG_VARIABLE])}
    submitted |= json.loads(environment[VARIABLE])
    folder.write(path, json.dumps(submitted, indent=2))


def keep_code(folder: Folder, archive: bytes) -> None:
    """Put the code into the run's folder."""
    folder.write(f"{folder.root}/{CODE_FILE}", archive)
