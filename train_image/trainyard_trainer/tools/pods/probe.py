"""Check that a pod of this image can run: its programs, its versions, and the storage of the runs.

    python -m trainyard_trainer.tools.pods.probe --path PATH [--endpoint URL]

prints one line `probe {...}`. Exit code 1 if a program is missing or the storage does not work.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import uuid
from collections.abc import Callable
from typing import Any

from trainyard_trainer.errors import ConfigError, StorageError
from trainyard_trainer.run_files.driver_output import PROBE, record_line
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.versions import versions

NEEDED = ("bash", "python", "ray")
"""Programs that the operator and the entrypoint start."""

REQUESTS = 3
"""A probe tells how the storage is now: it does not wait for one to come back."""


class WrongAnswer(Exception):
    """The storage does something else than it was asked to do."""


def probe(path: str, endpoint: str | None) -> dict[str, Any]:
    """What was found. Each step on the storage is `ok`, or says why not; later ones are then left out."""
    return {
        "versions": versions(),
        "programs": {name: shutil.which(name) for name in NEEDED},
        "storage": try_storage(path, endpoint),
    }


def try_storage(path: str, endpoint: str | None) -> dict[str, str]:
    """Write, read back, list and delete a file of its own in the storage."""
    name = f".trainyard-probe-{uuid.uuid4().hex[:8]}"
    steps: dict[str, str] = {}
    try:
        folder = RunFolder.open(path, name, endpoint, requests=REQUESTS)
    except ConfigError as error:
        return {"open": str(error)}
    file, said = f"{folder.root}/probe.txt", f"written by {name}"

    def read() -> None:
        if (found := folder.read(file).decode()) != said:
            raise WrongAnswer(f"{folder.show(file)} holds {found!r}, where {said!r} was written")

    def list_files() -> None:
        if folder.files() != ["probe.txt"]:
            raise WrongAnswer(f"{folder.show(folder.root)} lists {folder.files()}, not probe.txt")

    def delete() -> None:
        folder.delete(folder.root)
        if folder.exists(file):
            raise WrongAnswer(f"{folder.show(file)} is there after its deletion")

    todo: list[tuple[str, Callable[[], None]]] = [
        ("write", lambda: folder.write(file, said)),
        ("read", read),
        ("list", list_files),
        ("delete", delete),
    ]
    for step, do in todo:
        try:
            do()
        except (StorageError, WrongAnswer) as error:
            steps[step] = str(error)
            return steps
        steps[step] = "ok"
    return steps


def is_well(found: dict[str, Any]) -> bool:
    return all(found["programs"].values()) and set(found["storage"].values()) == {"ok"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainyard_trainer.tools.pods.probe", allow_abbrev=False
    )
    parser.add_argument("--path", required=True, help="where the folders of runs lie")
    parser.add_argument("--endpoint", help="address of an S3 server that is not AWS")
    wanted = parser.parse_args(arguments)
    found = probe(wanted.path, wanted.endpoint)
    print(record_line(PROBE, found), flush=True)
    return 0 if is_well(found) else 1


if __name__ == "__main__":
    sys.exit(main())
