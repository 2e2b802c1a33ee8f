"""The trainer's tools by the launcher's command line, with a tool that only does what it is told to."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainyard.errors import ConfigError, RunFailed
from trainyard.local import tools as program
from trainyard.local.tools import run_tool
from trainyard_trainer.run_files.programs import isolation

ROOT = Path(__file__).resolve().parents[2]

SHOW_ARGUMENTS = "import sys; print(' '.join(sys.argv[1:]))"

WAIT_FOR_CTRL_C = """
import pathlib, signal
def leave(*_):
    pathlib.Path("left").touch()
    raise SystemExit(130)
signal.signal(signal.SIGINT, leave)
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which `python -m trainyard_trainer.tools.<module>` finds its modules."""
    monkeypatch.setattr(program, "NEEDED", ())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "trainyard_trainer"
    tools = package / "tools"
    tools.mkdir(parents=True)
    for folder in (package, tools):
        (folder / "__init__.py").touch()
    # The launcher reads the real ones.
    for room in ("config", "run_files"):
        shutil.copytree(ROOT / "train_image/trainyard_trainer" / room, package / room)
    monkeypatch.setattr(isolation, "START", str(package / "run_files/programs/start.py"))
    for module in ("checkpoints", "export", "predict", "data"):
        (tools / f"{module}.py").write_text(SHOW_ARGUMENTS)
    return tools


def trainyard(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainyard", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("typed", "passed_on"),
    [
        ("checkpoints ls digits", "ls -- digits"),
        ("checkpoints ls ./there/digits --json", "ls --json -- ./there/digits"),
        (
            "checkpoints verify digits --storage s3://b/p --endpoint http://s3:9000",
            "verify --storage=s3://b/p --endpoint=http://s3:9000 -- digits",
        ),
        (
            "checkpoints prune digits --keep 2 --keep-best --keep-every-epochs 5 --dry-run",
            "prune --keep=2 --keep-best --keep-every-epochs=5 --dry-run -- digits",
        ),
        (
            "checkpoints export digits --out m.onnx --format onnx --checkpoint best",
            "--out=m.onnx --format=onnx --checkpoint=best -- digits",
        ),
        (
            "predict digits a.png b.png --top 3 --grid g.png --json",
            "--top=3 --grid=g.png --json -- digits a.png b.png",
        ),
        (
            "predict digits --data s3://b/in --out s3://b/out --image-column photo --batch-size 8",
            "--data=s3://b/in --out=s3://b/out --image-column=photo --batch-size=8 -- digits",
        ),
        (
            "predict chat prompts.jsonl --out answers.parquet --temperature 0 --length 9",
            "--length=9 --temperature=0 --out=answers.parquet -- chat prompts.jsonl",
        ),
        (
            "data prepare in/ out --size 64 --valid-share 0.1 --encoding raw",
            "prepare --valid-share=0.1 --size=64 --encoding=raw -- in/ out",
        ),
        ("data inspect out --grid g.png", "inspect --grid=g.png -- out"),
        ("data prepare in/ out --channels 1", "prepare --channels=1 -- in/ out"),
    ],
)
def test_what_was_typed_is_passed_on(tools: Path, typed: str, passed_on: str) -> None:
    ended = trainyard(*typed.split())
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"{passed_on}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoints", "ls", "Digits"], "NAME = 'Digits': must be at most 38 characters"),
        (["checkpoints", "ls", "none.yaml"], "cannot read none.yaml"),
        (["checkpoints", "prune", "digits"], "Missing option '--keep'"),
        (["checkpoints", "prune", "digits", "--keep", "0"], "'--keep': 0 is not a whole number"),
        (["checkpoints", "export", "digits", "--format", "h5"], "h5 is not one of state_dict"),
        (
            ["predict", "digits"],
            "Name image files, or give tables of images with --data PATH and --out PATH",
        ),
        (["predict", "digits", "--data", "in"], "--data PATH needs --out PATH"),
        (["predict", "digits", "a.png", "--data", "in", "--out", "x"], "FILE and --data exclude"),
        (["predict", "digits", "--data=in", "--out=x", "--seed=1"], "--data and --seed exclude"),
        (
            ["predict", "digits", "--data=in", "--trust-code", "--top=2"],
            "--data with --trust-code and --top exclude",
        ),
        (["predict", "digits", "a.png", "--label-column", "x"], "FILE and --label-column exclude"),
        (["data", "prepare", "in/"], "Missing argument"),
    ],
)
def test_bad_input_starts_no_tool(tools: Path, arguments: Sequence[str], message: str) -> None:
    ended = trainyard(*arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr


def test_a_run_file_stands_for_its_run(tools: Path) -> None:
    ended = trainyard("checkpoints", "ls", str(ROOT / "examples/digits.yaml"))
    assert ended.stdout == "ls -- digits\n"


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_tools_exit_code_and_words_are_the_commands_own(
    tools: Path, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    (tools / "data.py").write_text(
        f"import sys; print('error: what', file=sys.stderr); sys.exit({code})"
    )
    assert run_tool("data", []) == code
    assert capfd.readouterr().err == "error: what\n"


def test_a_killed_tool_is_told(tools: Path) -> None:
    (tools / "data.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(RunFailed, match="`data` was ended by SIGKILL"):
        run_tool("data", [])


def test_missing_packages_are_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(ConfigError, match=r"not installed: no_such_package\n.*pip install"):
        run_tool("data", [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_command_ends_its_tool_first(tools: Path, number: signal.Signals) -> None:
    (tools / "data.py").write_text(WAIT_FOR_CTRL_C)
    with subprocess.Popen(
        [sys.executable, "-m", "trainyard", "data", "inspect", "in/"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait() == 130
    assert Path("left").exists()
