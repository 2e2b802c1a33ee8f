"""The launcher's commands and the trainer's tools are built from one definition of their arguments."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from trainyard.__main__ import run
from trainyard.cli.app import app
from trainyard_trainer.config.tools.arguments import Tool
from trainyard_trainer.config.tools.checkpoint_tools import (
    CHECKPOINTS_EXPORT,
    CHECKPOINTS_LS,
    CHECKPOINTS_PRUNE,
    CHECKPOINTS_VERIFY,
)
from trainyard_trainer.config.tools.data_tools import DATA_INSPECT, DATA_PREPARE, DATA_TOKENIZER
from trainyard_trainer.config.tools.prediction_tool import PREDICT
from trainyard_trainer.config.tools.shared_arguments import RUN
from trainyard_trainer.tools.command_line import parse

COMMANDS = {
    "checkpoints ls": CHECKPOINTS_LS,
    "checkpoints verify": CHECKPOINTS_VERIFY,
    "checkpoints prune": CHECKPOINTS_PRUNE,
    "checkpoints export": CHECKPOINTS_EXPORT,
    "predict": PREDICT,
    "data prepare": DATA_PREPARE,
    "data inspect": DATA_INSPECT,
    "data tokenizer": DATA_TOKENIZER,
}
ARGUMENTS = [
    pytest.param(command, argument, id=f"{command} {argument.name}")
    for command, tool in COMMANDS.items()
    for argument in tool.arguments
]


def command_of(words: str) -> Any:
    found: Any = typer.main.get_command(app)
    for word in words.split():
        found = found.commands[word]
    return found


@pytest.mark.parametrize("tool", COMMANDS.values(), ids=COMMANDS)
def test_the_help_of_a_tool_shows_all_arguments(
    tool: Tool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"], tool)
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for argument in tool.arguments:
        assert (argument.name if argument.is_option else argument.metavar) in shown


@pytest.mark.parametrize(("command", "argument"), ARGUMENTS)
def test_a_command_offers_each_argument_with_its_help(command: str, argument: Any) -> None:
    offered = {parameter.name: parameter for parameter in command_of(command).params}
    parameter = offered[argument.key]
    assert parameter.required == argument.is_required
    assert parameter.param_type_name == ("option" if argument.is_option else "argument")
    if argument is not RUN:
        assert parameter.help == argument.full_help


@pytest.mark.parametrize(("command", "tool"), COMMANDS.items())
def test_a_command_offers_nothing_else(command: str, tool: Tool) -> None:
    offered = {parameter.name for parameter in command_of(command).params}
    assert offered == {argument.key for argument in tool.arguments}


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("checkpoints prune", ["--keep", "0"], "0 is not a whole number of at least 1"),
        ("checkpoints prune", ["--keep", "1.5"], "1.5 is not a whole number of at least 1"),
        ("checkpoints export", ["--format", "h5"], "h5 is not one of state_dict, torchscript"),
        ("data prepare", ["dest", "--valid-share", "1"], "1 is not a number between 0 and 1"),
        ("data prepare", ["dest", "--channels", "2"], "2 is not one of 1, 3"),
        ("data tokenizer", ["--vocab-size=257", "--out=t"], "257 is not a whole number from 258"),
        ("predict", ["--prompt=a", "--temperature=nan"], "nan is not a number of at least 0"),
        ("predict", ["--prompt=a", "--seed=-1"], "-1 is not a whole number of at least 0"),
        ("predict", [], "predict has no input"),
        ("predict", ["a.png", "--prompt=a"], "FILE and --prompt exclude each other"),
        ("predict", ["a.png", "--label-column=x"], "FILE and --label-column exclude each other"),
        ("predict", ["--prompt=a", "--top=2"], "--prompt and --top exclude each other"),
        ("predict", ["--data=in", "--out=x", "--seed=1"], "--data and --seed exclude each other"),
        ("predict", ["a.png", "--out=x"], "--out = x has to end in .parquet or .jsonl"),
        (
            "predict",
            ["a", "b", "--out=x.jsonl"],
            "--out takes one FILE with prompts, and 2 are named",
        ),
        (
            "predict",
            ["a", "--out=x.jsonl", "--top=2"],
            "FILE with --out and --top exclude each other",
        ),
        ("predict", ["s3://b/a.png"], "FILE s3://b/a.png must be a path of this machine"),
        ("predict", ["--data=in"], "--data PATH needs --out PATH"),
        ("predict", ["--split=valid", "--top=2"], "--split and --top exclude each other"),
        ("predict", ["--split=test"], "test is not one of train, valid"),
    ],
)
def test_a_command_and_its_tool_refuse_the_same(
    command: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command.split(), "digits", *options]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        parse(["digits", *options], COMMANDS[command])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_an_argument_that_was_not_given_has_its_default() -> None:
    tool, found = parse(["digits", "a.png", "b.png"], PREDICT)
    assert tool is PREDICT
    assert vars(found) == {
        **{
            "run": "digits",
            "files": ["a.png", "b.png"],
            "prompt": None,
            "prompt_as": None,
            "chat": False,
            "data": None,
        },
        **{"base_model": None, "split": None, "trust_code": False},
        **{"length": 200, "temperature": 0.8, "seed": 0, "out": None, "image_column": "image"},
        **{"label_column": None, "top": 1, "grid": None, "checkpoint": "delivered"},
        **{"batch_size": 64, "storage": "runs", "endpoint": None, "json": False},
    }


def test_the_commands_of_a_tool_are_told_apart() -> None:
    tools = (DATA_PREPARE, DATA_INSPECT)
    for tool, words in zip(tools, (["prepare", "in", "out"], ["inspect", "in"]), strict=True):
        assert parse(words, *tools)[0] is tool
