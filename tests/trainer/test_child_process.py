"""A child process is killed together with the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from attempts import wait_for

from trainyard_trainer.child_process import killed_with_parent

PARENT = """
import subprocess, sys
from trainyard_trainer.child_process import killed_with_parent
child = subprocess.Popen(killed_with_parent(["sleep", "600"]))
print(child.pid, flush=True)
child.wait()
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert wait_for(lambda: not is_running(child), 10)


def test_it_is_the_program_itself_with_its_exit_code() -> None:
    ended = subprocess.run(
        killed_with_parent(["sh", "-c", "echo $$; exit 7"]), capture_output=True, text=True
    )
    assert ended.returncode == 7
    assert int(ended.stdout) != os.getpid()
