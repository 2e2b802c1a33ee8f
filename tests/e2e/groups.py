"""Groups of tests on a cluster: `.ci/run` runs one group for each commit, and the tests that are in no group.

usage: python3 tests/e2e/groups.py    print the group of the commit that is checked out
"""

from __future__ import annotations

import subprocess

GROUPS: dict[str, tuple[str, ...]] = {
    "alerts": ("alerts",),
    "bucket": ("test_s3.py",),
    "drills": ("test_drills.py", "test_soak.py"),
    "fine-tuning": ("test_finetune.py",),
    "git": ("git",),
    "limits": ("test_limits.py", "test_reproduce.py", "test_final_failure.py"),
    "own-code": ("test_own_code.py", "test_own_recipe_on_cluster.py"),
    "placement": ("test_placed_pods.py", "test_cluster_features.py", "test_capacity.py"),
    "queue": ("queue",),
    "strategies": ("test_strategies.py", "test_elastic.py"),
    "sweep": ("test_sweep.py", "test_api.py"),
    "warm-cluster": ("test_warm_cluster.py",),
}
"""The files of each group. A folder is a suite on a cluster that is made for it, as by `make e2e-queue`."""


def group_of(commit: str) -> str:
    """Return the group of a commit, given its full hash. All groups are about equally frequent."""
    return list(GROUPS)[int(commit, 16) % len(GROUPS)]


def is_left_out(name: str, group: str | None) -> bool:
    """Whether a file of tests/e2e belongs to another group than the given one; None stands for all groups."""
    return group is not None and any(name in files for key, files in GROUPS.items() if key != group)


if __name__ == "__main__":
    head = subprocess.run(
        ("git", "rev-parse", "HEAD"), capture_output=True, text=True, check=True
    ).stdout
    print(group_of(head.strip()))
