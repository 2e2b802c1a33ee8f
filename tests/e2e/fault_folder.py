"""A folder on this machine that can be made to fail, with `faultfs` mounted over it."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from conftest import CLUSTER_HOME, cluster_py

END_LIMIT_S = 30.0


@dataclass(frozen=True)
class Fault:
    """The fault of the folder."""

    file: Path

    def begin(self, words: str) -> None:
        """Set the fault: `full`, `read-only` or `slow 100ms`."""
        self.file.write_text(words)

    def end(self) -> None:
        self.file.unlink(missing_ok=True)


@contextmanager
def fault_folder(folder: Path) -> Iterator[Fault]:
    """Mount faultfs over a folder. It affects all files that are opened after that."""
    cluster_py("build", "faultfs")
    with tempfile.TemporaryDirectory() as place:
        fault, backing = Fault(Path(place) / "fault"), Path(place) / "backing"
        backing.mkdir()
        subprocess.run(["mount", "--bind", folder, backing], check=True)
        command = [CLUSTER_HOME / "bin/faultfs", backing, folder, fault.file]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"mounted\n"
            try:
                yield fault
            finally:
                fault.end()
                process.terminate()
                try:
                    process.wait(END_LIMIT_S)
                finally:
                    process.kill()
                    subprocess.run(["umount", backing], check=True)
