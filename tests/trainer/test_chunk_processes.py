"""The processes that make the chunks of a large source."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from attempts import wait_for

from trainyard_trainer.data.preparation.tokens.chunk_processes import MADE_HERE, ChunkProcesses


def process_of(number: int) -> tuple[int, int]:
    return number, os.getpid()


def test_a_small_source_is_made_in_this_process_alone() -> None:
    processes = ChunkProcesses(process_of, 2)
    made = [processes.submit(number) for number in range(MADE_HERE)]
    assert [each.result() for each in made] == [
        (number, os.getpid()) for number in range(MADE_HERE)
    ]
    assert processes.ahead == 0
    processes.end()


@pytest.mark.ci
def test_a_large_source_is_made_in_other_processes_in_its_order() -> None:
    processes = ChunkProcesses(process_of, 2)
    made = [processes.submit(number) for number in range(MADE_HERE + 6)]
    numbers, owners = zip(*(each.result() for each in made), strict=True)
    assert numbers == (*range(MADE_HERE + 6),)
    assert os.getpid() not in owners[MADE_HERE:]
    assert processes.ahead == 4
    processes.end()


WAITS = """
import os, sys, time
from pathlib import Path
from trainyard_trainer.data.preparation.tokens.chunk_processes import MADE_HERE, ChunkProcesses

def make(number):
    if number >= MADE_HERE:
        (Path(sys.argv[1]) / str(os.getpid())).touch()
        time.sleep(600)

if __name__ == "__main__":
    processes = ChunkProcesses(make, 2)
    made = [processes.submit(number) for number in range(MADE_HERE + 2)]
    made[-1].result()
"""


@pytest.mark.ci
def test_the_processes_end_with_one_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    seen = tmp_path / "seen"
    seen.mkdir()
    process = subprocess.Popen([sys.executable, str(tmp_path / "waits.py"), str(seen)])
    assert wait_for(lambda: len([*seen.iterdir()]) == 2, 60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert wait_for(
        lambda: not any(Path(f"/proc/{each.name}").exists() for each in seen.iterdir()), 30
    )
