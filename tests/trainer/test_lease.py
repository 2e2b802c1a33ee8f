"""One attempt at a time: real processes that claim a run, die, stop and wake up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from trainyard_trainer.errors import RunError, StorageError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.ownership.claim_holder import ClaimHolder
from trainyard_trainer.run_folder.ownership.fence import Fence, Fenced
from trainyard_trainer.run_folder.ownership.lease import Lease, LeaseTimes, refuse_if_live

QUICK = LeaseTimes(heartbeat_s=0.05, stale_s=0.5, wait_s=0.5, say_s=0.1, poll_s=0.02)
PATIENT = replace(QUICK, stale_s=1000, wait_s=1000)

DRIVER = """
import dataclasses, json, sys
from trainyard_trainer.errors import RunError
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.ownership.claim_holder import ClaimHolder
from trainyard_trainer.run_folder.ownership.lease import Lease, LeaseTimes

def answer(text):
    print(text.splitlines()[0], flush=True)

path, endpoint, times, place = json.loads(sys.argv[1])
folder = RunFolder.open(path, "small", endpoint)
holder = dataclasses.replace(ClaimHolder.current(), **place)
answer("ready")
sys.stdin.readline()
try:
    with Lease.acquire(folder, lambda line: None, times=LeaseTimes(**times), holder=holder) as lease:
        answer(f"attempt {lease.attempt}")
        for line in sys.stdin:
            lease.check()
            answer("holds")
except RunError as error:
    answer(f"{type(error).__name__}: {error}")
"""
"""Claims the run when told to, and answers each further line with a check of its lease."""

Storage = tuple[str, "str | None"]

pytestmark = pytest.mark.usefixtures("no_rest")


def open_folder(storage: Storage) -> RunFolder:
    path, endpoint = storage
    return RunFolder.open(path, "small", endpoint)


class Driver:
    """A process that claims the run, and holds it until it is told to end."""

    def __init__(self, storage: Storage, place: dict[str, Any]) -> None:
        task = json.dumps([*storage, asdict(QUICK), place])
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, task],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdin
        assert self.process.stdout
        self._questions, self._answers = self.process.stdin, self.process.stdout

    def tell(self) -> None:
        self._questions.write("\n")
        self._questions.flush()

    def answer(self) -> str:
        return self._answers.readline().strip()

    def check(self) -> str:
        self.tell()
        return self.answer()

    def end(self) -> None:
        self._questions.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def drivers(number: int, storage: Storage, **place: Any) -> Iterator[list[Driver]]:
    """Processes that are about to claim the run."""
    every = [Driver(storage, place) for _ in range(number)]
    try:
        assert [one.answer() for one in every] == ["ready"] * number
        yield every
    finally:
        for one in every:
            one.kill()


@contextmanager
def driver(storage: Storage, **place: Any) -> Iterator[Driver]:
    """A process that holds the run as its first attempt."""
    with drivers(1, storage, **place) as (one,):
        assert one.check() == "attempt 1"
        yield one


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# One at a time.


def test_attempts_follow_each_other_and_those_on_record(folder: RunFolder) -> None:
    with Lease.acquire(folder) as lease:
        assert lease.attempt == 1
    with Lease.acquire(folder) as lease:
        assert lease.attempt == 2
    folder.append(folder.attempts, '{"attempt": 7}\n')
    with Lease.acquire(folder) as lease:
        assert lease.attempt == 8
        lease.check()
    names = folder.file_names(folder.lease)
    assert names == [f"a{n}.{kind}" for n in (1, 2, 8) for kind in ("beat", "ended", "json")]


def test_of_many_that_start_at_once_one_gets_the_run(storage: Storage) -> None:
    with driver(storage) as dead:
        dead.kill()
    with drivers(6, storage) as every:
        for one in every:
            one.tell()
        answers = sorted(one.answer() for one in every)
    assert answers[-1] == "attempt 2"
    refusal = "RunIsLive: the run small is being trained already: by attempt 2"
    assert [answer.partition(",")[0] for answer in answers[:-1]] == [refusal] * 5


def test_a_second_start_on_this_machine_is_refused_at_once(storage: Storage) -> None:
    with driver(storage) as first:
        with pytest.raises(RunError) as refused:
            Lease.acquire(open_folder(storage), times=PATIENT)
        assert "the run small is being trained already: by attempt 1" in str(refused.value)
        assert f"stop it (kill {first.process.pid})" in str(refused.value)
        assert first.check() == "holds"


def test_who_would_change_a_living_run_is_refused(storage: Storage) -> None:
    folder = open_folder(storage)
    refuse_if_live(folder)
    with driver(storage, host="host-7") as living:
        with pytest.raises(RunError, match="on host-7, still gives signs of life"):
            refuse_if_live(folder)
        living.end()
        until(lambda: folder.exists(f"{folder.lease}/a1.ended"))
        refuse_if_live(folder)


def test_an_attempt_whose_command_was_killed_is_waited_for(folder: RunFolder) -> None:
    gone = (os.getpid(), 0)  # the process of this id has another start time
    first = Lease.acquire(folder, holder=replace(ClaimHolder.current(), front_end=gone))
    first.__enter__()
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        first.__exit__(None, None, None)

    with Lease.acquire(folder, say) as second:
        assert second.attempt == 2
    assert "was killed: waiting at most 120 s until the attempt has saved and ended" in lines[0]


def test_a_killed_attempt_is_followed_at_once(storage: Storage) -> None:
    said: list[str] = []
    with driver(storage) as first:
        first.kill()
        with Lease.acquire(open_folder(storage), said.append, times=PATIENT) as lease:
            assert lease.attempt == 2
    assert len(said) == 1
    assert f"attempt 1, process {first.process.pid} on " in said[0]


def test_a_stopped_attempt_elsewhere_is_followed_and_cannot_go_on(storage: Storage) -> None:
    said: list[str] = []
    with driver(storage, boot_id="another machine") as first:
        first.process.send_signal(signal.SIGSTOP)
        with Lease.acquire(open_folder(storage), said.append, times=QUICK) as lease:
            first.process.send_signal(signal.SIGCONT)
            fenced = "Fenced: attempt 2 has taken over from attempt 1, which gave no sign of life."
            assert first.check() == fenced
            lease.check()
    assert "waiting for the end of attempt 1" in said[0]
    assert "gave no sign of life for " in said[-1]


def test_a_living_attempt_elsewhere_is_waited_for_and_then_respected(storage: Storage) -> None:
    said: list[str] = []
    with driver(storage, host="host-7") as first:
        with pytest.raises(RunError, match="on host-7, still gives signs of life after "):
            Lease.acquire(open_folder(storage), said.append, times=replace(QUICK, stale_s=30))
        assert first.check() == "holds"
    assert len(said) >= 2
    # On a slow machine the waiting is over before the last word.
    assert "lease: waiting for the end of" in said[0]
    assert all(f"attempt 1, process {first.process.pid} on host-7" in line for line in said)


def test_an_attempt_elsewhere_that_ends_is_followed(storage: Storage) -> None:
    with (
        driver(storage, pid_namespace="another pod") as first,
        Lease.acquire(open_folder(storage), lambda line: first.end(), times=PATIENT) as lease,
    ):
        assert lease.attempt == 2


def test_a_claim_that_cannot_be_read_is_judged_by_its_signs_of_life(folder: RunFolder) -> None:
    folder.write(f"{folder.lease}/a3.json", "")
    said: list[str] = []
    with Lease.acquire(folder, said.append, times=QUICK) as lease:
        assert lease.attempt == 4
    assert "an unknown process" in said[0]


def test_a_folder_that_cannot_be_written_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "small").write_text("")
    with pytest.raises(StorageError, match=r"small/lease/a1\.json cannot be created"):
        Lease.acquire(RunFolder.open(str(tmp_path), "small"))


# Fences.


def test_the_newest_worker_group_of_the_newest_attempt_may_write(folder: RunFolder) -> None:
    with Lease.acquire(folder) as lease:
        first = Fence.claim(folder, lease.attempt)
        first.check()
        second = Fence.claim(folder, lease.attempt)
        with pytest.raises(Fenced, match="worker group 2 has taken over from worker group 1"):
            first.check()
        Fence(folder, lease.attempt, second.group).check()
        lease.check()
    with Lease.acquire(folder) as lease:
        with pytest.raises(Fenced, match="attempt 2 has taken over from attempt 1"):
            second.check()
        with pytest.raises(Fenced):
            Fence.claim(folder, 1)
        assert Fence.claim(folder, lease.attempt).group == 1


def test_the_lease_notices_by_itself_that_it_is_lost(folder: RunFolder) -> None:
    said: list[str] = []
    with Lease.acquire(folder, said.append, times=QUICK) as lease:
        assert not lease.is_fenced
        folder.write(f"{folder.lease}/a2.json", "{}")
        until(lambda: lease.is_fenced)
    assert "attempt 2 has taken over from attempt 1" in said[-1]
    assert not folder.exists(f"{folder.lease}/a1.ended")


def test_who_removes_the_folder_ends_the_attempt(folder: RunFolder) -> None:
    with Lease.acquire(folder) as lease:
        fence = Fence.claim(folder, lease.attempt)
        until(
            lambda: folder.exists(f"{folder.lease}/a1.beat")
        )  # a file that appears would be in its way
        folder.delete(folder.lease)
        for holder in (lease, fence):
            with pytest.raises(Fenced, match=r"is gone, .* the run's folder was removed"):
                holder.check()


def test_a_machine_that_does_not_share_the_disk_of_the_driver_is_told_so(
    folder: RunFolder, tmp_path: Path
) -> None:
    with Lease.acquire(folder) as lease:
        Fence(folder, lease.attempt).check_visible()
        elsewhere = RunFolder.open(str(tmp_path / "another-disk"), folder.name)
        with pytest.raises(Fenced, match=r"never to be seen on .* a disk of another machine"):
            Fence(elsewhere, lease.attempt).check_visible()


def test_a_claim_that_another_has_overwritten_is_lost(folder: RunFolder) -> None:
    with Lease.acquire(folder) as lease:
        folder.write(f"{folder.lease}/a1.json", "{}")
        with pytest.raises(Fenced, match="begun anew"):
            lease.check()


def test_a_storage_that_is_away_for_a_while_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.open(str(tmp_path), "small")
    said: list[str] = []
    failures = [StorageError("the server is away")] * 3

    def write(path: str, data: str, *, is_durable: bool = True) -> None:
        if failures:
            raise failures.pop()
        RunFolder.write(folder, path, data, is_durable=is_durable)

    monkeypatch.setattr(folder, "write", write)
    with Lease.acquire(folder, said.append, times=QUICK) as lease:
        until(lambda: folder.exists(f"{folder.lease}/a1.beat"))
        lease.check()
    assert said == ["lease: no sign of life could be written: the server is away"]


def test_where_claims_are_not_exclusive_the_output_says_so(folder: RunFolder) -> None:
    said: list[str] = []
    with Lease.acquire(folder, said.append):
        pass
    assert bool(said) == bool(folder.exclusion_gap)


# Who is alive.


def test_a_process_is_told_from_one_that_got_its_number() -> None:
    here = ClaimHolder.current()
    assert here.is_visible()
    assert here.is_alive()
    assert not replace(here, started=here.started + 1).is_alive()


@pytest.mark.parametrize("change", ["host", "boot_id", "pid_namespace"])
def test_processes_elsewhere_are_out_of_sight(change: str) -> None:
    assert not replace(ClaimHolder.current(), **{change: "other"}).is_visible()


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
    holder = replace(ClaimHolder.current(), pid=child.pid, started=started)
    assert holder.is_alive()
    child.kill()
    until(lambda: not holder.is_alive())
    child.communicate()
