"""A run begins anew: what it had keeps a name, and nobody writes for the old one any more."""

from __future__ import annotations

from pathlib import Path

import pytest
from attempts import Attempts
from training import small_config

from trainyard_trainer.config.trainer_config import RUN_NAME_LIMIT
from trainyard_trainer.errors import RunError
from trainyard_trainer.run_files.submission import code_file
from trainyard_trainer.run_folder import set_aside
from trainyard_trainer.run_folder.folder import RunFolder
from trainyard_trainer.run_folder.ownership.fence import Fenced
from trainyard_trainer.run_folder.ownership.lease import Lease

pytestmark = pytest.mark.usefixtures("no_rest")

FILES = {"run.json": "{}", "metrics.jsonl": "1\n", "checkpoints/e1/model.pt": "weights"}


def fill(folder: RunFolder) -> Lease:
    """A run that was trained; its lease has ended."""
    with Lease.acquire(folder) as lease:
        for file, text in FILES.items():
            folder.write(f"{folder.root}/{file}", text)
    return lease


def held(folder: RunFolder) -> dict[str, str]:
    files = [file for file in folder.files() if not file.startswith("lease/")]
    return {file: folder.read(f"{folder.root}/{file}").decode() for file in files}


def test_all_that_a_run_had_lies_under_another_name(folder: RunFolder) -> None:
    for number in (1, 2):
        fill(folder)
        name = set_aside.set_aside(folder)
        assert name == f"small-old-{number}"
        assert held(folder.sibling(name)) == FILES
        assert held(folder) == {}


def test_code_lies_under_both_names_since_the_next_submission_may_be_what_brought_it(
    folder: RunFolder,
) -> None:
    file = code_file("a" * 64)
    folder.write(f"{folder.root}/{file}", "archive")
    assert set_aside.set_aside(folder) is None  # code alone is no run
    fill(folder)
    assert set_aside.set_aside(folder) == "small-old-1"
    assert held(folder) == {file: "archive"}
    assert held(folder.sibling("small-old-1")) == FILES | {file: "archive"}
    assert set_aside.set_aside(folder) is None


def test_a_run_that_has_nothing_is_left_alone(folder: RunFolder) -> None:
    assert set_aside.set_aside(folder) is None
    assert folder.files() == []


def test_an_old_attempt_that_wakes_up_is_fenced(folder: RunFolder) -> None:
    old = fill(folder)
    set_aside.set_aside(folder)
    with pytest.raises(Fenced, match="has taken over"):
        old.check()


def test_a_run_that_is_being_trained_is_refused(folder: RunFolder) -> None:
    fill(folder)
    with Lease.acquire(folder), pytest.raises(RunError, match="being trained already"):
        set_aside.set_aside(folder)
    assert held(folder) == FILES


@pytest.mark.parametrize("then", ["set aside again", "the next attempt"])
@pytest.mark.parametrize("moved", range(len(FILES)))
def test_a_kill_in_the_middle_loses_nothing(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, moved: int, then: str
) -> None:
    fill(folder)
    move, left = folder.move, [moved]

    def killed(source: str, target: str) -> None:
        if not left[0]:
            raise OSError("killed")
        left[0] -= 1
        move(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(folder, "move", killed)
        with pytest.raises(OSError, match="killed"):
            set_aside.set_aside(folder)
    if then == "set aside again":
        assert set_aside.set_aside(folder) == "small-old-1"
    else:
        with Lease.acquire(folder) as lease:
            set_aside.finish(folder, lease)
    assert held(folder) == {}
    assert held(folder.sibling("small-old-1")) == FILES


def test_a_long_name_is_cut(tmp_path: Path) -> None:
    name = "a" * (RUN_NAME_LIMIT - 7) + "-" + "b" * 6
    folder = RunFolder.open(str(tmp_path), name)
    fill(folder)
    assert set_aside.set_aside(folder) == "a" * (RUN_NAME_LIMIT - 7) + "-old-1"


@pytest.mark.slow
def test_another_run_is_refused_until_the_old_one_is_set_aside(
    attempts: Attempts, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_config(attempts.storage)
    attempts.finish(config, arguments=["--without-ray"])
    other = small_config(attempts.storage, train__seed=config.train.seed + 1)
    assert "--fresh" in attempts.finish(other, code=2, arguments=["--without-ray"])
    assert set_aside.main(["--path", str(attempts.storage), config.name]) == 0
    assert capsys.readouterr().out == f"{config.name}-old-1\n"
    assert "start: from scratch" in attempts.finish(other, arguments=["--without-ray"])
    assert '"succeeded"' in attempts.read(config, f"../{config.name}-old-1/summary.json")
