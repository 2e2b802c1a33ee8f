"""The queue of a standing RayCluster: first come, first served, and no place is lost with a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trainyard_trainer.on_ray.place_queue import Ticket, places_taken, standing

A, B, C = (Ticket(run=run, workers=workers) for run, workers in (("a", 3), ("b", 4), ("c", 1)))


@pytest.mark.parametrize(
    ("before", "own", "position", "behind"),
    [
        ([], B, 0, ()),
        ([A], C, 0, ()),
        ([A], B, 1, ("a",)),
        # The small run fits beside the one that trains, but would overtake the one that waits.
        ([A, B], C, 2, ("a", "b")),
        ([A, B, B], C, 3, ("a", "b", "b")),
    ],
)
def test_a_run_starts_once_it_fits_beside_all_before_it(
    before: list[Ticket], own: Ticket, position: int, behind: tuple[str, ...]
) -> None:
    found = standing(own, before, places=4)
    assert (found.position, found.behind) == (position, behind)


def test_a_run_that_has_its_places_at_once_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with places_taken(A, lambda: 4, tmp_path), places_taken(C, lambda: 4, tmp_path):
        assert len([*tmp_path.glob("*.json")]) == 2
    assert not [*tmp_path.glob("*.json")]
    assert capsys.readouterr().out == ""


def test_a_run_starts_when_the_one_before_it_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waits, started = threading.Event(), threading.Event()

    def places() -> int:
        waits.set()
        return 4

    def second() -> None:
        with places_taken(B, places, tmp_path):
            started.set()

    thread = threading.Thread(target=second)
    with places_taken(A, lambda: 4, tmp_path):
        thread.start()
        assert waits.wait(60)
        assert not started.is_set()
    thread.join(60)
    assert started.is_set()
    said = capsys.readouterr().out.splitlines()
    assert said[0] == ('waiting {"position": 1, "workers": 4, "places": 4, "behind": ["a"]}')
    assert said[-1] == 'waiting {"position": 0, "workers": 4, "places": 4, "behind": []}'


HOLD = """
import signal, sys
from pathlib import Path
from trainyard_trainer.on_ray.place_queue import Ticket, places_taken
with places_taken(Ticket(run="killed", workers=4), lambda: 4, Path(sys.argv[1])):
    print("has its places", flush=True)
    signal.pause()
"""


def test_a_killed_driver_gives_its_places_back(tmp_path: Path) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "has its places\n"
    os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    assert len([*tmp_path.glob("*.json")]) == 1
    with places_taken(B, lambda: 4, tmp_path):
        assert len([*tmp_path.glob("*.json")]) == 1  # its own
