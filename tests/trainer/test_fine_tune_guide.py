"""The guide to fine-tuning: its program, run file and commands work as they stand, and without a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

GUIDE = Path(__file__).parents[2] / "docs/guides/fine-tune.md"


@pytest.mark.ci
def test_a_reader_of_the_guide_trains_a_tiny_model_that_answers(tmp_path: Path) -> None:
    text = GUIDE.read_text().partition("runs the three blocks -->")[2]
    program, run, commands = re.findall(r"```(?:python|yaml|sh)\n(.*?)```", text, re.S)[:3]
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "run.yaml").write_text(run)
    outputs = []
    for line in commands.strip().splitlines():
        # In a network namespace of its own, which leads nowhere: nothing asks a hub for anything.
        command = f'unshare --net "{sys.executable}" -m {line}'
        if " train " in command:
            command += " --without-ray"
        ended = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        outputs.append(ended.stdout)
    assert outputs[1] == "On Friday we open at 11.\n"
    assert (tmp_path / "model/model.safetensors").is_file()
    chat = subprocess.run(
        [sys.executable, "-m", "trainyard", "predict", "shop", "--chat", "--temperature", "0"],
        cwd=tmp_path,
        input="When do you open on Monday?\n\nHi. When do you open on Tuesday?\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert chat.stdout.splitlines() == ["On Monday we open at 7.", "On Tuesday we open at 8."]
