"""Each commit runs one group of the tests on a cluster, and every file of a group exists."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.groups import GROUPS, group_of, is_left_out

FOLDER = Path(__file__).resolve().parents[1] / "e2e"


def test_each_group_names_files_that_exist_and_no_file_is_in_two_groups() -> None:
    files = [file for group in GROUPS.values() for file in group]
    assert [file for file in files if not (FOLDER / file).exists()] == []
    assert len(files) == len(set(files))


def test_commits_are_distributed_over_all_groups() -> None:
    commits = [hashlib.sha1(str(number).encode()).hexdigest() for number in range(1000)]
    counts = Counter(map(group_of, commits))
    assert counts.keys() == GROUPS.keys()
    assert min(counts.values()) > 0.7 * 1000 / len(GROUPS)


@pytest.mark.parametrize(
    ("name", "group", "expected"),
    [
        ("test_skeleton.py", "sweep", False),
        ("test_sweep.py", "sweep", False),
        ("test_sweep.py", "bucket", True),
        ("test_sweep.py", None, False),
    ],
)
def test_a_group_leaves_out_the_files_of_the_others(
    name: str, group: str | None, expected: bool
) -> None:
    assert is_left_out(name, group) is expected
