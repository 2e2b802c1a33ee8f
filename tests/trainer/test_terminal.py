"""What the tools show on a terminal, and what they leave out where nobody looks."""

from __future__ import annotations

import io
import sys

import pytest

from trainyard_trainer import terminal
from trainyard_trainer.errors import ConfigError, RunError, StorageError
from trainyard_trainer.run_files.sizes import size_text
from trainyard_trainer.terminal import Bar, table_text
from trainyard_trainer.tools.command_line import Parser, exit_code_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "is_drawn"), [(Terminal(), True), (io.StringIO(), False)])
def test_only_a_terminal_gets_a_bar_and_it_is_wiped_out(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, is_drawn: bool
) -> None:
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.0)
    monkeypatch.setattr(terminal, "REDRAW_S", 0.0)
    monkeypatch.setattr(sys, "stderr", stream)
    with Bar("s1", 200) as bar:
        bar.advance(50)
        bar.advance(50)
    shown = stream.getvalue()
    assert (" 25%  s1" in shown, " 50%  s1" in shown) == (is_drawn, is_drawn)
    assert shown.endswith("\r\033[K") == is_drawn


def test_what_is_done_at_once_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with Bar("s1", 0) as bar:
        bar.advance(50)
    assert stream.getvalue() == ""


def test_numbers_stand_to_the_right_and_words_to_the_left() -> None:
    assert table_text(("name", "count"), [("a", "7"), ("long name", "-")]).splitlines() == [
        "name       count",
        "a              7",
        "long name      -",
    ]
    assert table_text(("name", "count"), []) == "name  count"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (35_840, "35 KiB"), (5_400_000, "5.1 MiB"), (3e15, "2,728.5 TiB")],
)
def test_sizes_have_units(count: float, text: str) -> None:
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("what"), 2),
        (RunError("what"), 1),
        (StorageError("/mnt cannot be read"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_failure_is_told_without_a_traceback(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    def fail() -> int:
        raise error

    assert exit_code_of(fail) == code
    said = capsys.readouterr().err
    assert said.startswith("error: ") == (code != 130)
    assert "Traceback" not in said


def test_wrong_options_are_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        Parser(prog="tool").parse_args(["--nonsense"])
    assert left.value.code == 2
    assert capsys.readouterr().err == "error: unrecognized arguments: --nonsense\n"
