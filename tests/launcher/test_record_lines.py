"""The progress of a run as one line."""

from __future__ import annotations

from typing import Any

import pytest

from trainyard.cli.record_lines import progress_text

PROGRESS: dict[str, Any] = {
    **{"epoch": 3, "epochs": 12, "step": 241, "steps": 980, "loss": 0.88, "eta_s": 130.0},
    **{"samples_per_s": 166.0, "attempt": 1},
}
SLOW = {"rank": 3, "node": "digits-x7k", "step_s": 0.9, "median_s": 0.31}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, ""),
        ({"goodput": 0.913}, "goodput 91%  "),
    ],
)
def test_progress_tells_the_goodput_so_far_once_it_is_known(
    more: dict[str, Any], text: str
) -> None:
    line = "epoch 3/12  step 241/980  loss 0.8800  166 samples/s  "
    assert progress_text(PROGRESS | more) == f"{line}{text}ETA 2:10"


def test_progress_names_each_slow_worker_with_its_node() -> None:
    told = progress_text(PROGRESS | {"slow_workers": [SLOW, SLOW | {"rank": 5}]})
    slow = "slow: worker {} on digits-x7k, 0.9 s per step (median 0.31 s)"
    assert told.endswith(f"ETA 2:10  {slow.format(3)}  {slow.format(5)}")
