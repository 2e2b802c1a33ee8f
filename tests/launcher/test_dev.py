"""`trainyard dev`: a run starts again when its files change, and only then."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from trainyard.errors import ConfigError
from trainyard.local.development import RunVersion, develop
from trainyard.local.training import local_config
from trainyard.planning.objects import pack_code
from trainyard.run_file.load import load_run

EXAMPLES = Path(__file__).parents[2] / "examples/recipes"

RUN = {
    "name": "watched",
    "resources": {"workers": 1},
    "code": "code",
    "data": {"dataset": "regression:Patients"},
    "train": {"recipe": "regression:Regression", "epochs": 1, "global_batch_size": 32},
}


class Ended(Exception):
    """Ends `develop`, which goes on for ever."""


class Session:
    """Trains nothing, but records each version; changes files while one is trained."""

    def __init__(self, folder: Path, edits: list[Callable[[], object]], *, ends: bool) -> None:
        self.folder = folder
        self.file = folder / "run.yaml"
        self.storage = folder / "code" / "runs"
        self.storage.mkdir(parents=True)
        shutil.copy(EXAMPLES / "regression.py", folder / "code")
        self.write()
        self.edits, self.ends = edits, ends
        self.trained: list[RunVersion] = []
        self.said: list[str] = []

    def write(self, text: str | None = None, **train: object) -> None:
        run = {**RUN, "train": {**RUN["train"], **train}}  # type: ignore[dict-item]
        self.file.write_text(yaml.safe_dump(run) if text is None else text)

    def load(self) -> RunVersion:
        run = load_run(self.file, [])
        code = pack_code(run, None)
        return RunVersion(run=run, config=local_config(run, self.storage, 1, code=code), code=code)

    def edit(self) -> None:
        """Make the next edit, a moment from now."""
        if not self.edits:
            raise Ended
        threading.Timer(0.2, self.edits.pop(0)).start()

    def train(self, version: RunVersion) -> None:
        self.trained.append(version)
        self.edit()
        if not self.ends:
            time.sleep(60)  # FilesChanged ends it

    def say(self, line: str) -> None:
        self.said.append(line)
        if line.startswith("error: "):
            self.edit()

    def develop(self) -> None:
        with pytest.raises(Ended):
            develop(self.file, self.storage, self.load, self.train, self.say)


@pytest.mark.parametrize("ends", [True, False], ids=["after its end", "while it trains"])
def test_a_run_starts_again_with_what_was_changed(tmp_path: Path, ends: bool) -> None:
    edits: list[Callable[[], object]] = []
    session = Session(tmp_path, edits, ends=ends)
    code = tmp_path / "code" / "regression.py"
    edits += [
        lambda: code.write_text(code.read_text() + "\n# changed\n"),
        lambda: session.write(epochs=2),
    ]
    session.develop()
    first, second, third = session.trained
    assert first.config.model_dump_json() != second.config.model_dump_json()  # the code's hash
    assert first.code != second.code
    assert second.code == third.code
    assert third.config.model_dump()["train"]["epochs"] == 2


def test_a_file_that_makes_no_difference_starts_nothing(tmp_path: Path) -> None:
    edits: list[Callable[[], object]] = []
    session = Session(tmp_path, edits, ends=False)

    def edit_others_first() -> None:
        (session.storage / "new.py").write_text("")  # in the storage
        (tmp_path / "code" / "regression.py").touch()  # the same content
        (tmp_path / "other.yaml").write_text("")
        time.sleep(1)
        session.write(epochs=3)

    edits.append(edit_others_first)
    session.develop()
    assert len(session.trained) == 2


def test_a_wrong_file_is_told_once_and_the_next_right_one_is_trained(tmp_path: Path) -> None:
    edits: list[Callable[[], object]] = []
    session = Session(tmp_path, edits, ends=True)
    edits += [lambda: session.write("name: [", epochs=2), lambda: session.write(epochs=2)]
    session.develop()
    assert len(session.trained) == 2
    assert len([line for line in session.said if line.startswith("error: ")]) == 1


def test_a_first_file_that_is_wrong_ends_the_command(tmp_path: Path) -> None:
    session = Session(tmp_path, [], ends=True)
    session.write("name: [")
    with pytest.raises(ConfigError):
        develop(session.file, session.storage, session.load, session.train, session.say)


@pytest.mark.ci
def test_an_edit_ends_the_run_which_goes_on_from_its_checkpoint_and_ctrl_c_ends_all(
    tmp_path: Path,
) -> None:
    (tmp_path / "code").mkdir()
    shutil.copy(EXAMPLES / "regression.py", tmp_path / "code")
    run = {**RUN, "train": {**RUN["train"], "epochs": 100000}}  # type: ignore[dict-item]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    process = subprocess.Popen(
        [sys.executable, "-m", "trainyard", "dev", "run.yaml"],
        cwd=tmp_path,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    is_edited = is_interrupted = False
    for line in process.stdout:
        print(line, end="")  # pytest shows it if the test fails, also at its time limit
        lines.append(line)
        if re.search(r"step [1-9]", line) and not is_edited:
            is_edited = True
            code = tmp_path / "code" / "regression.py"
            code.write_text(code.read_text() + "\n# changed\n")
        elif line.startswith("start: ") and is_edited and not is_interrupted:
            # Python writes a line a second time if it is interrupted while it writes it.
            is_interrupted = True
            process.send_signal(signal.SIGINT)
    assert process.wait() == 130, lines
    assert len({line for line in lines if line.startswith("start: checkpoint ")}) == 1, lines
    assert any("has changed: the run ends and starts again" in line for line in lines)
