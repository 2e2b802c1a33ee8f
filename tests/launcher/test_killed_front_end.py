"""A command on this machine that is killed: its training program saves and ends, and the run can go on."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

RUN_FILE = """
name: small
resources: {workers: 1}
data: {source: digits}
train:
  model: {name: resnet18, in_channels: 1, num_classes: 10}
  epochs: 2
  global_batch_size: 256
checkpoint: {every_s: 1}
"""
WAITS_S = 60.0


def train(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start `trainyard train`; its processes are known by the storage in their environment."""
    (folder / "run.yaml").write_text(RUN_FILE)
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


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "runs" / "small" / "model.pt", weights_only=True)


def kill_at_moments(tmp_path: Path, options: list[str], moments: int) -> None:
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    began = time.monotonic()
    finish(train(undisturbed, *options), undisturbed)
    took_s = time.monotonic() - began
    expected = weights(undisturbed)
    for number in range(moments):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        process = train(folder, *options)
        time.sleep(random.Random(number).uniform(0.2, took_s))
        process.kill()
        process.wait()
        finish(train(folder, *options), folder)
        found = weights(folder)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), number
        await_none(folder)


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_a_run_whose_command_was_killed_at_any_moment_gets_the_same_weights(tmp_path: Path) -> None:
    kill_at_moments(tmp_path, ["--without-ray"], 3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [[], ["--without-ray"], ["--torchrun"]], ids=str)
def test_twenty_kills_leave_the_weights_as_they_were(tmp_path: Path, options: list[str]) -> None:
    kill_at_moments(tmp_path, options, 20)
