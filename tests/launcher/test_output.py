"""Output never fails for the terminal's encoding or a closed pipe; the exit code says what was lost."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIGITS = "examples/digits.yaml"
COMMANDS = {
    "help": "--help",
    "schema": "schema run",
    "render": f"render {DIGITS}",
    "plan as a table": f"plan {DIGITS}",
    "plan as JSON": f"plan {DIGITS} --json",
    "a table": "drill --list",
}
ENCODINGS = (
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1"},
    {"PYTHONIOENCODING": "ascii:strict"},
    {"LC_ALL": "C"},
    {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
)

STRICTEST = ENCODINGS[2]
MARKED = [pytest.param(one, marks=() if one is STRICTEST else pytest.mark.ci) for one in ENCODINGS]


def shell(script: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a bash script in which `trainyard` is a command."""
    define = f'trainyard() {{ "{sys.executable}" -m trainyard "$@"; }}\n'
    return subprocess.run(
        ["bash", "-c", define + script],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_closed_pipe_is_code_141_without_a_word(command: str) -> None:
    # The reader is gone before the first byte.
    ended = shell(f"{{ sleep 0.1; trainyard {command}; echo $? >&3; }} 3>&2 2>/dev/null | true")
    assert ended.stderr == b"141\n"


@pytest.mark.parametrize(
    ("to", "code", "why"),
    [
        (">/dev/full", 1, b"No space left on device"),
        (">&-", 1, b"Bad file descriptor"),
        ("2>&-", 0, b""),
        ("2>/dev/full", 0, b""),
        ("<&-", 0, b""),
        ("<&- 2>&- >/dev/null", 0, b""),
    ],
)
@pytest.mark.parametrize("command", [COMMANDS["plan as a table"], COMMANDS["plan as JSON"]])
def test_output_that_is_closed_or_full(command: str, to: str, code: int, why: bytes) -> None:
    ended = shell(f"trainyard {command} {to}")
    assert ended.returncode == code
    assert why in ended.stderr
    assert b"Traceback" not in ended.stderr
    assert (b"digits" in ended.stdout) == (code == 0 and ">/dev/null" not in to)


def test_a_closed_standard_error_does_not_change_an_error() -> None:
    assert shell("trainyard plan none.yaml 2>&-").returncode == 2
    assert (
        shell("trainyard plan none.yaml 2>&1 >/dev/null | true; exit ${PIPESTATUS[0]}").returncode
        == 2
    )


@pytest.mark.ci
@pytest.mark.parametrize("encoding", MARKED, ids=str)
def test_any_encoding_takes_any_name(encoding: dict[str, str], tmp_path: Path) -> None:
    """File names that are not ASCII or not UTF-8, in output and in errors."""
    odd = os.fsencode(tmp_path) + b"/caf\xe9-\xe6\x97\xa5.yaml"
    Path(os.fsdecode(odd)).write_bytes((ROOT / DIGITS).read_bytes())
    file = "$'" + "".join(f"\\x{byte:02x}" for byte in odd) + "'"
    for command, code in (
        (f"plan {file}", 0),
        (f"plan {file} --json", 0),
        (f"render {file} --set 'image=x/y:z'", 0),
        (f"plan {file}.none", 2),
        (f"render {file} --set x={file}", 2),
        (f"logs {file}", 3),
        (f"cp {file}", 2),
        (f"list --context {file}", 3),
        (f"train {file} --storage {file}", 2),
        (f"checkpoints ls digits --storage {file}", 2),
    ):
        ended = shell(f"trainyard {command}", KUBECONFIG=str(tmp_path / "none"), **encoding)
        assert ended.returncode == code, (command, ended.stderr)
        assert b"Traceback" not in ended.stderr, command


@pytest.mark.parametrize("encoding", MARKED[:4], ids=str)
@pytest.mark.parametrize("command", [f"render {DIGITS}", f"plan {DIGITS} --json"])
def test_any_encoding_takes_any_value(encoding: dict[str, str], command: str) -> None:
    ended = shell(f"trainyard {command} --set data.source=/größe-日本", **encoding)
    assert ended.returncode == 0, ended.stderr


def test_output_of_other_programs_is_read_whatever_its_bytes_are() -> None:
    """Text that is not UTF-8 must not end a command: each call that reads text says `errors=`."""
    strict = []
    for file in [*ROOT.glob("launcher/**/*.py"), *ROOT.glob("train_image/**/*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                options = {option.arg for option in node.keywords}
                reads_text = options & {"text", "universal_newlines"} or (
                    "encoding" in options and "capture_output" in options
                )
                if reads_text and "errors" not in options and _is_of_subprocess(node.func):
                    strict.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert strict == []


def _is_of_subprocess(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Name)
        and function.value.id == "subprocess"
    )
