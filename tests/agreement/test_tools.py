"""The launcher offers just the options that the trainer's tools take."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import typer

import trainyard_trainer.tools.checkpoints
import trainyard_trainer.tools.data
import trainyard_trainer.tools.export
import trainyard_trainer.tools.predict
import trainyard_trainer.tools.predict_data
from trainyard.cli.app import app

Main = Callable[[list[str]], int]


@pytest.mark.parametrize(
    ("command", "mains", "words"),
    [
        ("checkpoints ls", [trainyard_trainer.tools.checkpoints.main], ["ls"]),
        ("checkpoints verify", [trainyard_trainer.tools.checkpoints.main], ["verify"]),
        ("checkpoints prune", [trainyard_trainer.tools.checkpoints.main], ["prune"]),
        ("checkpoints export", [trainyard_trainer.tools.export.main], []),
        (
            "predict",
            [trainyard_trainer.tools.predict.main, trainyard_trainer.tools.predict_data.main],
            [],
        ),
        ("data prepare", [trainyard_trainer.tools.data.main], ["prepare"]),
        ("data inspect", [trainyard_trainer.tools.data.main], ["inspect"]),
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
