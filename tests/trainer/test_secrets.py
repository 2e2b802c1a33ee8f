"""A secret reaches the user's code on a laptop, and nothing else shows its value."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

CANARY = "canary-7f3a9c51e2"

RUN = """
name: secret
resources: {workers: 2}
code: code
env: {GREETING: hello}
secrets: {HF_TOKEN: {name: hub, key: token}}
"""

FUNCTION = """
import hashlib, os
import ray, ray.data, ray.train
def digest(*_):
    return {"digest": [hashlib.sha256(os.environ["HF_TOKEN"].encode()).hexdigest()]}
def train(config):
    assert os.environ["GREETING"] == "hello"
    assert os.environ["HF_TOKEN"] not in str(ray.get_runtime_context().runtime_env)
    (row,) = ray.data.range(1).map_batches(digest).take(1)
    assert row["digest"] == digest()["digest"][0]
    print("worker", row["digest"], flush=True)
    ray.train.report({"done": 1})
"""

TORCHRUN = """
import hashlib, os
assert os.environ["GREETING"] == "hello"
print("worker", hashlib.sha256(os.environ["HF_TOKEN"].encode()).hexdigest(), flush=True)
"""


def train(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `trainyard train` in a folder."""
    return subprocess.run(
        [Path(sys.executable).with_name("trainyard"), "train", "run.yaml"],
        cwd=folder,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.ci
@pytest.mark.parametrize(
    ("run", "program"),
    [
        pytest.param("function: mine:train", FUNCTION, id="function"),
        pytest.param("command: [mine.py]\nrun_with: torchrun", TORCHRUN, id="torchrun"),
    ],
)
def test_workers_have_the_value_and_no_file_and_no_line_shows_it(
    tmp_path: Path, run: str, program: str
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/mine.py").write_text(program)
    (tmp_path / "run.yaml").write_text(RUN + run)
    ended = train(tmp_path, HF_TOKEN=CANARY)
    assert ended.returncode == 0, ended.stdout
    assert f"worker {hashlib.sha256(CANARY.encode()).hexdigest()}" in ended.stdout
    assert CANARY not in ended.stdout
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []


def test_without_the_value_nothing_starts(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/mine.py").write_text(FUNCTION)
    (tmp_path / "run.yaml").write_text(RUN + "function: mine:train")
    ended = train(tmp_path, HF_TOKEN="")
    assert ended.returncode == 2
    assert "run secret needs secrets that are not set here: HF_TOKEN" in ended.stdout
    assert not (tmp_path / "runs").exists()
