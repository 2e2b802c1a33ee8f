"""The launcher offers just the options that the trainer's tools take."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import typer

import trainer.checkpoints
import trainer.data.__main__
import trainer.export
import trainer.predict
import trainer.predict_data
from launcher.commands import app

Main = Callable[[list[str]], int]


@pytest.mark.parametrize(
    ("command", "mains", "words"),
    [
        ("checkpoints ls", [trainer.checkpoints.main], ["ls"]),
        ("checkpoints verify", [trainer.checkpoints.main], ["verify"]),
        ("checkpoints prune", [trainer.checkpoints.main], ["prune"]),
        ("checkpoints export", [trainer.export.main], []),
        ("predict", [trainer.predict.main, trainer.predict_data.main], []),
        ("data prepare", [trainer.data.__main__.main], ["prepare"]),
        ("data inspect", [trainer.data.__main__.main], ["inspect"]),
    ],
)
def test_a_command_and_its_tools_have_the_same_options(
    command: str, mains: list[Main], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    offered = typer.main.get_command(app)
    for word in command.split():
        offered = offered.commands[word]  # type: ignore[attr-defined]
    for main in mains:
        with pytest.raises(SystemExit):
            main([*words, "--help"])
    taken = set(re.findall(r"--[a-z]+(?:-[a-z]+)*", capsys.readouterr().out))
    options = {name for parameter in offered.params for name in parameter.opts if name[:2] == "--"}
    assert options | {"--help"} == taken
