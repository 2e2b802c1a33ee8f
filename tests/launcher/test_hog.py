"""The program of drills that exhausts a container: the kernel kills the process that is meant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainyard.drills.strikes import HOG

MEMORY = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 600 * 2**20
SLEEPER = "x = b'x' * {size}; import time; print(flush=True); time.sleep(60)"
AS_IN_A_CONTAINER = "echo 872 > /proc/self/oom_score_adj; mount --bind $0 /sys/fs/cgroup/memory; "

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not (MEMORY / "memory.limit_in_bytes").exists(),
    reason="a memory limit needs root and cgroup v1",
)


@pytest.fixture
def container() -> Iterator[Path]:
    """A cgroup with a memory limit."""
    folder = MEMORY / f"trainyard-hog-{os.getpid()}"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    yield folder
    folder.rmdir()


def start(container: Path, *words: str) -> subprocess.Popen[str]:
    """Start a program in the container, with the OOM score of one that has requested memory."""
    join = "echo $$ > $0/cgroup.procs; " + AS_IN_A_CONTAINER + 'exec "$@"'
    return subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", join, str(container), sys.executable, "-c", *words],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_small_process_is_killed_and_not_the_one_that_uses_the_memory(container: Path) -> None:
    victim, other = (
        start(container, SLEEPER.format(size=size)) for size in (40_000_000, 80_000_000)
    )
    for each in (victim, other):
        assert each.stdout is not None
        each.stdout.readline()
    Path(f"/proc/{other.pid}/oom_score_adj").write_text("1000")
    hog = start(container, HOG, "1.0", str(victim.pid))
    said, _ = hog.communicate()
    assert hog.returncode == 0
    kills, peak = said.split()
    assert int(kills) == 1
    assert float(peak) > 0.9
    assert victim.wait() == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()
