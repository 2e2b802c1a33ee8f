"""`data prepare --tokenizer`: tokens for both recipes ahead of a run, killed and resumed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.trainer.attempts import wait_for
from tests.trainer.causal_runs import CONTEXT_LENGTH, causal_config, write_chats
from tests.trainer.test_chat_data import files_in
from tests.trainer.test_language_model import text_config
from tests.trainer.training import open_folder

pytest.importorskip("transformers")

from tests.support.tiny_models import make_folder
from trainyard_trainer.attempt.attempt import open_data
from trainyard_trainer.attempt.checks import check_data
from trainyard_trainer.config.trainer_config import TrainerConfig
from trainyard_trainer.data.preparation.tokens import chunk_processes
from trainyard_trainer.data.preparation.tokens.token_chunks import Chunk, ChunkWriter
from trainyard_trainer.data.prepared import Prepared
from trainyard_trainer.tools.data import main

FINISH = ChunkWriter._finish


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text("".join(f"Line {number} of a long text.\n" for number in range(400)))
    return path


def words_of(recipe: str, model: Path, source: Path, dest: Path, *more: str) -> list[str]:
    options = [f"--tokenizer={model}", f"--recipe={recipe}", f"--context-length={CONTEXT_LENGTH}"]
    return ["prepare", *options, *more, "--", str(source), str(dest)]


def config_of(recipe: str, storage: Path, model: Path, source: Path) -> TrainerConfig:
    """A run on a source, or on what was prepared of it."""
    if recipe == "causal_lm":
        return causal_config(storage, model, source)
    changes: dict[str, Any] = {"train__model__tokenizer": str(model)}
    return text_config(storage, source, train__model__context_length=CONTEXT_LENGTH, **changes)


@pytest.mark.parametrize("recipe", ["causal_lm", "language_model"])
def test_a_run_trains_on_what_was_prepared_as_on_what_it_prepares_itself(
    tmp_path: Path, model: Path, prose: Path, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = prose if recipe == "language_model" else write_chats(tmp_path / "chats.jsonl")
    own = config_of(recipe, tmp_path / "own", model, source)
    words = words_of(recipe, model, source, tmp_path / "dest", f"--seed={own.train.seed}")
    words[1:1] = [f"--valid-share={own.data.valid_share}", "--jobs=1"]
    with patch.object(chunk_processes, "usable_cpus", side_effect=AssertionError):
        assert main(words) == 0
    said = capsys.readouterr().out
    assert f"validation rows of {CONTEXT_LENGTH + (recipe == 'language_model')} tokens" in said
    assert said.endswith(f" in 2 files: {tmp_path}/dest\n")
    assert main(words) == 0
    assert "was finished before" in capsys.readouterr().err
    ahead = config_of(recipe, tmp_path / "ahead", model, tmp_path / "dest")
    found = [open_data(each, open_folder(each)) for each in (own, ahead)]
    for config, data in zip((own, ahead), found, strict=True):
        assert isinstance(data, Prepared)
        check_data(config, data)
    assert found[0].info == found[1].info
    assert files_in(tmp_path / "dest") == files_in(tmp_path / "own" / own.name / "data")


@pytest.mark.ci
def test_a_killed_command_is_resumed_by_the_same_one(tmp_path: Path, model: Path) -> None:
    source = write_chats(tmp_path / "chats.jsonl", 20_000)
    words = words_of("causal_lm", model, source, tmp_path / "cut")
    command = [sys.executable, "-m", "trainyard_trainer.tools.data", *words]
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    first = tmp_path / "cut/.prepare/all-00000.json"
    wait_for(first.exists, timeout_s=120)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert not (tmp_path / "cut/dataset.json").exists()
    known = {path.stem for path in first.parent.glob("all-*.json")}
    made = []

    def finish(self: ChunkWriter[Any], chunk: Any) -> Chunk:
        made.append((found := FINISH(self, chunk)).name)
        return found

    with patch.object(ChunkWriter, "_finish", finish):
        assert main(words) == 0
    assert made
    assert not known & {*made}
    assert main(words_of("causal_lm", model, source, tmp_path / "whole")) == 0
    assert files_in(tmp_path / "cut") == files_in(tmp_path / "whole")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe=causal_lm"], "--recipe needs --tokenizer"),
        (
            ["--tokenizer=t"],
            "--tokenizer needs --recipe: causal_lm for rows of chats, prompts or text,",
        ),
        (["--tokenizer=t", "--recipe=causal_lm"], "--tokenizer needs --context-length: the number"),
        (["--tokenizer=t", "--recipe=gpt"], "gpt is not one of causal_lm, language_model"),
        (["--context-length=1"], "1 is not a whole number of at least 2"),
        (
            ["--tokenizer=t", "--recipe=causal_lm", "--context-length=9", "--size=8"],
            "--size and --tokenizer exclude each other",
        ),
        (
            ["--tokenizer=t", "--recipe=causal_lm", "--context-length=9", "--text-files=*.md"],
            "--text-files and --recipe causal_lm exclude each other",
        ),
        (
            ["--tokenizer=t", "--recipe=language_model", "--context-length=9", "--loss-on=all"],
            "--loss-on and --recipe language_model exclude each other",
        ),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["prepare", *words, "--", "chats.jsonl", "dest"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "name", "message"),
    [
        ("causal_lm", "none", "error: --tokenizer = {}/none: there is no such folder"),
        ("language_model", ".", "error: --tokenizer = {} has no tokenizer: none of"),
    ],
)
def test_a_folder_without_a_tokenizer_is_named_by_its_option(
    tmp_path: Path, recipe: str, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words_of(recipe, tmp_path / name, tmp_path / "a", tmp_path / "dest")) == 2
    assert capsys.readouterr().err.startswith(message.format(tmp_path))
