"""A command on this machine that is killed: its training program saves and ends, and the run can go on."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples/recipes"

RUN_FILE = """
name: small
resources: {workers: 1}
code: code
data: {dataset: "regression:Patients"}
train: {recipe: "regression:Regression", epochs: EPOCHS, global_batch_size: 32}
checkpoint: {every_s: 1}
"""
WAITS_S = 60.0


OWN_RUN_FILE = """
name: small
resources: {workers: 1}
code: code
command: [python, own.py]
"""

OWN_PROGRAM = """
import os, signal, sys, time
folder = os.path.join(os.environ["TRAINYARD_STORAGE"], "small")
def save(*_):
    open(os.path.join(folder, "saved"), "w").close()
    sys.exit(1)
if not os.path.exists(os.path.join(folder, "saved")):
    signal.signal(signal.SIGTERM, save)
    open(os.path.join(folder, "begun"), "w").close()
    time.sleep(600)
"""
"""A program that saves at SIGTERM, and ends at once if it has saved."""


def train(folder: Path, *options: str, run_file: str) -> subprocess.Popen[bytes]:
    """Start `trainyard train`; its processes are known by the storage in their environment."""
    (folder / "run.yaml").write_text(run_file)
    (folder / "code").mkdir(exist_ok=True)
    shutil.copy(EXAMPLES / "regression.py", folder / "code")
    command = [
        sys.executable,
        "-m",
        "trainyard",
        "train",
        "run.yaml",
        "--storage",
        "runs",
        *options,
    ]
    output = (folder / "output.txt").open("ab")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FOLDER_OF_THIS_TEST": str(folder)}
    with output:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    assert process.wait() == 0, (folder / "output.txt").read_text()


def processes_of(folder: Path) -> list[str]:
    """The command lines of the living processes that belong to a test's run."""
    mark = f"FOLDER_OF_THIS_TEST={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().decode(errors="replace"))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def await_none(folder: Path) -> None:
    deadline = time.monotonic() + WAITS_S
    while left := processes_of(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def await_file(path: Path, process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + 3 * WAITS_S
    while not path.exists():
        assert time.monotonic() < deadline, output.read_text()
        assert process.poll() in (None, -signal.SIGKILL), output.read_text()
        time.sleep(0.1)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "runs" / "small" / "model.pt", weights_only=True)


def kill_at_moments(tmp_path: Path, options: list[str], moments: int, epochs: int) -> None:
    run_file = RUN_FILE.replace("EPOCHS", str(epochs))
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    began = time.monotonic()
    finish(train(undisturbed, *options, run_file=run_file), undisturbed)
    took_s = time.monotonic() - began
    expected = weights(undisturbed)
    for number in range(moments):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        process = train(folder, *options, run_file=run_file)
        time.sleep(random.Random(number).uniform(0.2, took_s))
        process.kill()
        process.wait()
        finish(train(folder, *options, run_file=run_file), folder)
        found = weights(folder)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), number
        await_none(folder)


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_a_run_whose_command_was_killed_at_any_moment_gets_the_same_weights(tmp_path: Path) -> None:
    kill_at_moments(tmp_path, ["--without-ray"], moments=2, epochs=20)


@pytest.mark.ci
def test_a_program_of_the_user_gets_sigterm_when_the_command_was_killed(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/own.py").write_text(OWN_PROGRAM)
    process = train(tmp_path, run_file=OWN_RUN_FILE)
    await_file(tmp_path / "runs/small/begun", process, tmp_path / "output.txt")
    process.kill()
    process.wait()
    await_file(tmp_path / "runs/small/saved", process, tmp_path / "output.txt")
    finish(train(tmp_path, run_file=OWN_RUN_FILE), tmp_path)
    await_none(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [[], ["--without-ray"], ["--torchrun"]], ids=str)
def test_twenty_kills_leave_the_weights_as_they_were(tmp_path: Path, options: list[str]) -> None:
    kill_at_moments(tmp_path, options, moments=20, epochs=60)
