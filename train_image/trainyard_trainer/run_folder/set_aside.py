"""Begin a run anew: move the files of its folder to another name, under which every command finds them.

    python -m trainyard_trainer.run_folder.set_aside --path PATH [--endpoint URL] NAME

prints that name, or nothing where there is nothing to set aside. The leases stay: attempts count on, so
whatever an old one still writes is fenced off by the next. Code stays, too, and is copied: it may have been
uploaded for the submission that begins anew.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import PurePosixPath

from trainyard_trainer.config.trainer_config import RUN_NAME_LIMIT
from trainyard_trainer.errors import ConfigError, TrainerError
from trainyard_trainer.run_files.names import CODE
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.ownership.lease import Lease
from trainyard_trainer.storage import ASIDE


def set_aside(folder: RunFolder) -> str | None:
    """The name under which its files lie now; None if it has none. Raises RunError while it is live."""
    if not _to_move(folder):
        return None
    with Lease.acquire(folder, _say) as lease:
        return move_all(folder, lease)


def finish(folder: RunFolder, lease: Lease) -> None:
    """Go on where a killed `set_aside` has stopped, if one has."""
    if folder.exists(folder.set_aside):
        move_all(folder, lease)


def move_all(folder: RunFolder, lease: Lease) -> str:
    """Move all but the leases to another run's folder, which a file names until all is there."""
    if folder.exists(folder.set_aside):
        name = folder.read(folder.set_aside).decode()
    else:
        name = _free_name(folder)
        folder.write(folder.set_aside, name)
    target = folder.sibling(name)
    lease.check()
    for file in folder.file_names(f"{folder.root}/{CODE}"):
        if not file.endswith(ASIDE):
            folder.copy(f"{folder.root}/{CODE}/{file}", f"{target.root}/{CODE}/{file}")
    for file in _to_move(folder):
        folder.move(f"{folder.root}/{file}", f"{target.root}/{file}")
    for left in folder.subfolders(folder.root):
        if f"{folder.root}/{left}" != folder.lease and left != CODE:
            folder.delete(f"{folder.root}/{left}")
    folder.delete(folder.set_aside)
    return name


def _to_move(folder: RunFolder) -> list[str]:
    marker = PurePosixPath(folder.set_aside).name
    return [
        file
        for file in folder.files()
        if not file.startswith(("lease/", f"{CODE}/"))
        and not file.endswith(ASIDE)
        and file != marker
    ]


def _free_name(folder: RunFolder) -> str:
    """`<run>-old-<number>`, where no run lies yet; a long name is cut, for it must be a run's name too."""
    for number in itertools.count(1):
        suffix = f"-old-{number}"
        name = folder.name[: RUN_NAME_LIMIT - len(suffix)].rstrip("-") + suffix
        if not folder.sibling(name).files():
            break
    return name


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainyard_trainer.run_folder.set_aside", allow_abbrev=False
    )
    parser.add_argument("--path", required=True, help="where the folders of runs lie")
    parser.add_argument("--endpoint", help="address of an S3 server that is not AWS")
    parser.add_argument("name", help="the run")
    wanted = parser.parse_args(arguments)
    try:
        name = set_aside(RunFolder.open(wanted.path, wanted.name, wanted.endpoint))
    except ConfigError as error:
        parser.error(str(error))
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if name is not None:
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
