"""Attempts that are forked from a process that has imported their packages."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from attempts import Attempts, lines, ray_config, wait_for
from training import small_config

pytestmark = pytest.mark.ci
MUST = {"TRAINYARD_TEST_MUST_FORK": "1"}


def test_a_forked_attempt_trains_on_a_ray_of_its_own_with_forked_workers(
    attempts: Attempts,
) -> None:
    output = attempts.finish(ray_config(attempts), environment=MUST)
    assert "not forked" not in output
    (summary,) = lines(output, "summary")
    assert summary["outcome"] == "succeeded"
    assert summary["startup"]["lease"] < 20
    assert wait_for(lambda: not attempts.processes(), 60)


@pytest.mark.parametrize("is_driver", [True, False], ids=["driver", "client"])
def test_a_killed_attempt_leaves_no_driver(attempts: Attempts, is_driver: bool) -> None:
    driver = attempts.start(
        small_config(attempts.storage, train__epochs=500),
        environment=MUST,
        arguments=["--without-ray"],
    )
    assert driver.stdout is not None
    assert any(line.startswith("start: ") for line in driver.stdout)
    (forked,) = attempts.processes("trainyard_trainer")
    assert forked != driver.pid
    if is_driver:
        driver.kill()
    else:
        os.kill(driver.pid, signal.SIGKILL)
    driver.communicate()
    assert driver.returncode == -signal.SIGKILL
    assert wait_for(lambda: not Path(f"/proc/{forked}").exists(), 60)
